"""npu_rms_norm and npu_add_rms_norm.

They take a weight of x's dtype. Where they round a half-precision product is not documented, so that both orders of
``cast_order`` are given to them. ``1 + weight`` cannot be formed in half precision: that is left to others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable


def takes(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, round_before_weight: bool) -> bool:
    return _takes(x, weight, zero_centered)


def takes_sum(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, *_: bool) -> bool:
    return _takes(x, weight, zero_centered) and residual.dtype == x.dtype and residual.shape == x.shape


def takes_backward(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    *_: bool,
) -> bool:
    return _takes(x, weight, zero_centered) and grad_y.dtype == x.dtype


def _takes(x: Tensor, weight: Tensor | None, zero_centered: bool) -> bool:
    exact = not zero_centered or x.dtype == torch.float32
    return exact and computable(x, weight) and x.dim() > 1 and (weight is None or weight.shape == x.shape[-1:])


def forward(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    y, rstd = torch.ops.npu.npu_rms_norm(x, _factor(x, weight, zero_centered), eps)
    return y, rstd.squeeze(-1)


def forward_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, round_before_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(x, residual, _factor(x, weight, zero_centered), eps)
    return y, total, rstd.squeeze(-1)


def backward(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    round_before_weight: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    factor = _factor(x, weight, zero_centered)
    grad_x, grad_factor = torch.ops.npu.npu_rms_norm_backward(grad_y, x, factor, rstd.unsqueeze(-1))
    grad_x = grad_x if grad_sum is None else grad_x + grad_sum
    if weight is None or not weight_gradient:
        return grad_x, factor.new_empty(0)
    return grad_x, grad_factor.to(weight.dtype)  # float32 until here


def _factor(x: Tensor, weight: Tensor | None, zero_centered: bool) -> Tensor:
    if weight is None:
        return x.new_ones(x.shape[-1])
    return 1 + weight if zero_centered else weight
