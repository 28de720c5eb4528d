"""npu_swiglu, which has gate and up in one tensor.

Two tensors are copied into one first. That moves more than a kernel for two would (``ascendc`` has one), but less than
half of what the definition does in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable


def takes(gate: Tensor, up: Tensor | None) -> bool:
    if not computable(gate, up) or gate.dim() > 8:
        return False
    return gate.shape[-1] % 2 == 0 if up is None else gate.shape == up.shape


def takes_backward(grad_y: Tensor, gate: Tensor, up: Tensor | None) -> bool:
    return takes(gate, up) and grad_y.dtype == gate.dtype


def forward(gate: Tensor, up: Tensor | None) -> Tensor:
    return torch.ops.npu.npu_swiglu(_joined(gate, up), -1)


def backward(grad_y: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    grad = torch.ops.npu.npu_swiglu_backward(grad_y, _joined(gate, up), -1)
    if up is None:
        return grad, gate.new_empty(0)
    grad_gate, grad_up = (half.contiguous() for half in grad.chunk(2, dim=-1))
    return grad_gate, grad_up


def _joined(gate: Tensor, up: Tensor | None) -> Tensor:
    return gate if up is None else torch.cat((gate, up), dim=-1)
