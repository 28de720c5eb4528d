"""Arguments for the operators, and a call of one on either device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import mindspeed_kernels as kernels


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def heads(*shape: int) -> Tensor:
    return rand(shape[0], shape[2], shape[1], shape[3]).detach().transpose(1, 2).requires_grad_()


def angles(*shape: int) -> Tensor:
    return rand(*shape, grad=False).sin()


def attend(**options: Any) -> Callable[..., Any]:
    return lambda *tensors, **more: kernels.flash_attention(*tensors, **options, **more)


def seqlens(*ends: int) -> Tensor:
    return torch.tensor(ends)


X = rand(3, 5, 8)
QKV = (rand(2, 5, 4, 8), rand(2, 7, 2, 8), rand(2, 7, 2, 6))
PACKED = tuple(t.detach().flatten(0, 1).requires_grad_() for t in QKV)
ENDS = {"cu_seqlens_q": seqlens(0, 3, 3, 10), "cu_seqlens_k": seqlens(0, 6, 6, 14)}
INDEX = torch.tensor([[0, 2], [1, 0], [5, 2], [2, -1]])
OFFSETS = torch.tensor([2, 2, 4], dtype=torch.int32)
SOURCE = kernels.moe_permute(torch.zeros(4, 1), INDEX, 3)[2]


def outputs_and_gradients(function: Callable[..., Any], arguments: Any, device: str) -> list[Tensor]:
    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(Tensor, copy, arguments)
    outputs = [t for t in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor)]
    floating = [t for t in outputs if t.is_floating_point()]
    torch.autograd.backward(
        floating, [torch.linspace(-1, 1, t.numel()).view(t.shape).to(device, t.dtype) for t in floating]
    )
    grads = [t.grad for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    assert all(t.device.type == device for t in (*outputs, *grads))
    return [t.detach().cpu() for t in (*outputs, *grads)]
