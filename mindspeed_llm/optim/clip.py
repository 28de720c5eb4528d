"""Gradient norm and clipping over parameters that live on different meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mindspeed_llm.optim.local import local


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of joint norm ``norm`` are multiplied by so that it is at most ``max_norm`` (0: no limit)."""
    return max_norm / norm if 0 < max_norm < norm < float("inf") else 1.0


@torch.no_grad()
def clip_gradients_as_torch(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale all gradients in place as torch's own function does, and return their norm: for parity with its users.

    Its norm is less exact, and it divides by the norm + 1e-6. It takes gradients of one mesh only; those of several are
    joined here. Collective.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    meshes: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for gradient in gradients:
        meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [_full(torch.nn.utils.get_total_norm(group)) for group in meshes.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            local(gradient).mul_(coefficient)
    return norm.item()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """The joint 2-norm of all gradients as one process would have them, every element counted once. Collective.

    The same float on every rank. Local sums of squares are added up once per rank with the share that it holds alone:
    a gradient that ``copies`` ranks hold (replicated mesh dimensions, plain tensors) counts 1/copies on each of them,
    so one float64 sum over the world is the square of the norm, whatever meshes the gradients live on.
    """
    square = 0.0
    for gradient in (p.grad for p in parameters if p.grad is not None):
        square += _sum_of_squares(local(gradient)) / _copies(gradient)
    total = torch.tensor([square], dtype=torch.float64)
    dist.all_reduce(total)
    return total.sqrt().item()


def _sum_of_squares(tensor: torch.Tensor, row: int = 4096) -> float:
    """Sum of squares in float32 to about 1e-7, on any device.

    torch's own norm adds one element after the other per lane on a CPU and is off by 1e-3 at 30 million elements;
    norms of short rows, added pairwise by ``torch.sum``, are as fast and exact to rounding.
    """
    flat = tensor.reshape(-1)
    rows, rest = flat[: flat.numel() // row * row].view(-1, row), flat[flat.numel() // row * row :]
    norms = torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).view(-1) for part in (rows, rest)])
    return norms.square().sum().item()


def _copies(gradient: torch.Tensor) -> int:
    world = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return world
    copies = world // gradient.device_mesh.size()  # ranks outside this mesh hold the same gradient
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        assert isinstance(placement, (Shard, Replicate)), placement
        copies *= size if isinstance(placement, Replicate) else 1
    return copies
