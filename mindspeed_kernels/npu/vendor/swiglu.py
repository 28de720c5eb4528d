"""npu_swiglu, which has gate and up in one tensor.

Two tensors would have to be copied into one first, which moves more than PyTorch's own silu and product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable


def takes(gate: Tensor, up: Tensor | None) -> bool:
    return up is None and computable(gate) and gate.shape[-1] % 2 == 0 and gate.dim() <= 8


def takes_backward(grad_y: Tensor, gate: Tensor, up: Tensor | None) -> bool:
    return takes(gate, up) and grad_y.dtype == gate.dtype


def forward(gate: Tensor, up: Tensor | None) -> Tensor:
    return torch.ops.npu.npu_swiglu(gate, -1)


def backward(grad_y: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.npu.npu_swiglu_backward(grad_y, gate, -1), gate.new_empty(0)
