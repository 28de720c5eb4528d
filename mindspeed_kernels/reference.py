"""The definition of every operator, in plain PyTorch.

Each function says what its fused counterpart computes: half-precision inputs are widened to float32, the formula is
evaluated there, and the result is rounded once, except where a docstring names another rounding. Tests evaluate these
functions in float64 and hold the kernels against them; float64 tensors and devices without kernels run them directly.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

CastOrder = Literal["hf", "float32"]


def _widened(x: Tensor) -> Tensor:
    """``x`` in the type that the arithmetic is done in: float64 for float64, float32 for all others."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: CastOrder = "hf",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; see :func:`mindspeed_kernels.rms_norm`."""
    if residual is not None:
        x = x + residual
    wide = _widened(x)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        y = normalized.to(x.dtype)
    else:
        factor = 1.0 + _widened(weight) if zero_centered else _widened(weight)
        if cast_order == "hf":  # x.dtype times weight.dtype, with PyTorch's promotion
            y = (_widened(normalized.to(x.dtype)) * factor).to(torch.promote_types(x.dtype, weight.dtype))
        else:
            y = (normalized * factor).to(x.dtype)
    return y if residual is None else (y, x)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys; see :func:`mindspeed_kernels.rotary`."""
    rotary_dim = cos.shape[-1]
    out_dtype = torch.promote_types(q.dtype, cos.dtype)
    cos, sin = _widened(cos).unsqueeze(1), _widened(sin).unsqueeze(1)  # [batch | 1, 1, seq, rotary_dim]
    if interleaved:
        cos = cos[..., : rotary_dim // 2].repeat_interleave(2, dim=-1)
        sin = sin[..., : rotary_dim // 2].repeat_interleave(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        rotated, passed = _widened(x[..., :rotary_dim]), x[..., rotary_dim:]
        if interleaved:
            partner = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
        else:
            first, second = rotated.chunk(2, dim=-1)
            partner = torch.cat((-second, first), dim=-1)
        return torch.cat(((rotated * cos + partner * sin).to(out_dtype), passed.to(out_dtype)), dim=-1)

    return rotate(q), rotate(k)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``; see :func:`mindspeed_kernels.swiglu`."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return (F.silu(_widened(gate)) * _widened(up)).to(gate.dtype)
