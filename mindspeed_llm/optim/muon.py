"""Muon (Jordan et al., 2024; at scale: Liu et al., 2025, https://arxiv.org/abs/2502.16982) over sharded masters."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mindspeed_kernels import newton_schulz
from mindspeed_llm.optim.adamw import AdamW
from mindspeed_llm.optim.local import local
from mindspeed_llm.parallel.structure import decoder_layers, expert_modules, num_experts

_MOMENTUM = 0.95


class Muon(AdamW):
    """Momentum, orthogonalized, for the groups that say ``"orthogonal": True``; AdamW for all others.

    An orthogonalized matrix has a root mean square of about ``1 / sqrt(larger dimension)``. It is scaled to the 0.2
    that AdamW's updates have, so that both work with one learning rate and one weight decay.
    """

    def _step(self, group: dict[str, Any], parameters: list[nn.Parameter], gradient_scale: float) -> None:
        if not group.get("orthogonal", False):
            return super()._step(group, parameters, gradient_scale)
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            momentum, gradient = local(state["momentum_buffer"]), local(cast(torch.Tensor, parameter.grad))
            gradient = gradient * gradient_scale
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = _orthogonal(parameter, gradient.lerp_(momentum, _MOMENTUM))  # Nesterov's
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
        return None


def _orthogonal(parameter: nn.Parameter, shard: torch.Tensor) -> torch.Tensor:
    """This rank's part of the orthogonalized matrix, or stack of matrices, of which it holds ``shard``.

    A part of a matrix orthogonalized by itself is no part of the orthogonalized matrix: matrices are gathered, each on
    its own. Whole matrices of a stack stay where they are.
    """
    if not isinstance(parameter, DTensor):
        return newton_schulz(shard)
    mesh, cut = parameter.device_mesh, parameter.placements
    whole: list[Placement] = [p if parameter.ndim > 2 and p.is_shard(0) else Replicate() for p in cut]
    update = _distributed(shard, mesh, cut, parameter).redistribute(placements=whole).to_local()
    return _distributed(newton_schulz(update), mesh, whole, parameter).redistribute(placements=cut).to_local()


def _distributed(shard: torch.Tensor, mesh: Any, placements: Any, like: torch.Tensor) -> DTensor:
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def hidden_matrices(model: PreTrainedModel) -> set[torch.Tensor]:
    """What Muon is for: the weights of linear layers and the stacks of experts inside the model's blocks.

    Not embeddings, the head, vectors, convolutions, and not the routers, whose rows are the experts' own.
    """
    matrices: set[torch.Tensor] = set()
    for block in decoder_layers(model):
        linear = {m for m in block.modules() if isinstance(m, (nn.Linear, Conv1D)) and min(m.weight.shape) > 1}
        for experts in expert_modules(block):
            matrices.update(p for p in experts.parameters(recurse=False) if p.ndim == 3)
            around = next(module for module in block.modules() if experts in module.children())
            linear -= {m for m in linear & set(around.modules()) if len(m.weight) == num_experts(experts)}
        matrices.update(module.weight for module in linear)
    return matrices
