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

from mindspeed_kernels.reference._common import widened as _widened
from mindspeed_kernels.reference.adamw import adamw_step_
from mindspeed_kernels.reference.flash_attention import flash_attention, flash_attention_backward
from mindspeed_kernels.reference.linear_attention import (
    GateActivation,
    causal_conv1d,
    gated_delta_rule,
    rms_norm_gated,
)
from mindspeed_kernels.reference.linear_cross_entropy import (
    cross_entropy,
    cross_entropy_gradient,
    linear_cross_entropy,
)
from mindspeed_kernels.reference.moe import fused_experts, grouped_gemm, moe_permute, moe_unpermute
from mindspeed_kernels.reference.newton_schulz import newton_schulz

__all__ = [
    "GateActivation",
    "adamw_step_",
    "add_rms_norm",
    "causal_conv1d",
    "cross_entropy",
    "cross_entropy_gradient",
    "flash_attention",
    "flash_attention_backward",
    "fused_experts",
    "gated_delta_rule",
    "grouped_gemm",
    "linear_cross_entropy",
    "moe_permute",
    "moe_unpermute",
    "newton_schulz",
    "rms_norm",
    "rms_norm_gated",
    "rotary",
    "swiglu",
]

CastOrder = Literal["hf", "float32"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: CastOrder = "hf",
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; see :func:`mindspeed_kernels.rms_norm`."""
    wide = _widened(x)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalized.to(x.dtype)
    _check_weight(weight, x)
    factor = 1.0 + _widened(weight) if zero_centered else _widened(weight)
    if cast_order == "hf":  # x.dtype times weight.dtype, with PyTorch's promotion
        return (_widened(normalized.to(x.dtype)) * factor).to(torch.promote_types(x.dtype, weight.dtype))
    return (normalized * factor).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: CastOrder = "hf",
) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual)`` and ``x + residual``, which is rounded first."""
    _check_like("rms_norm", "residual", residual, "x", x)
    total = x + residual
    return rms_norm(total, weight, eps=eps, zero_centered=zero_centered, cast_order=cast_order), total


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys; see :func:`mindspeed_kernels.rotary`."""
    _check_rotary(q, k, cos, sin)
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
        torch._check(
            gate.shape[-1] % 2 == 0,
            lambda: (
                f"swiglu: without up, the last dimension of gate must be even to hold [gate | up], but gate is "
                f"{list(gate.shape)}"
            ),
        )
        gate, up = gate.chunk(2, dim=-1)
    _check_like("swiglu", "up", up, "gate", gate)
    return (F.silu(_widened(gate)) * _widened(up)).to(gate.dtype)


def _check_weight(weight: Tensor, x: Tensor) -> None:
    torch._check(
        weight.shape == x.shape[-1:],
        lambda: (
            f"rms_norm: weight must have shape {list(x.shape[-1:])}, the last dimension of x {list(x.shape)}, but "
            f"has {list(weight.shape)}"
        ),
    )


def _check_like(op: str, name: str, tensor: Tensor, model_name: str, model: Tensor) -> None:
    torch._check(
        tensor.shape == model.shape and tensor.dtype == model.dtype,
        lambda: (
            f"{op}: {name} must be like {model_name}, {list(model.shape)} of {model.dtype}, but is "
            f"{list(tensor.shape)} of {tensor.dtype}"
        ),
    )


def _check_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    def fits() -> bool:
        if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
            return False
        batch, _, seq, head_dim = q.shape
        return (
            (k.shape[0], *k.shape[2:]) == (batch, seq, head_dim)
            and cos.shape == sin.shape
            and cos.shape[0] in (1, batch)
            and cos.shape[1] == seq
            and cos.shape[2] % 2 == 0
            and cos.shape[2] <= head_dim
        )

    torch._check(
        fits(),
        lambda: (
            "rotary: q [batch, num_heads, seq, head_dim], k [batch, num_key_value_heads, seq, head_dim] and cos and "
            "sin [batch or 1, seq, even rotary_dim <= head_dim] do not fit together: "
            f"q is {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
        ),
    )
    torch._check(
        q.dtype == k.dtype and cos.dtype == sin.dtype,
        lambda: (
            f"rotary: q and k, and cos and sin, must have one dtype, but have {q.dtype} and {k.dtype}, {cos.dtype} "
            f"and {sin.dtype}"
        ),
    )
