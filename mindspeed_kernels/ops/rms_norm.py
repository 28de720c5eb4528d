"""Root-mean-square normalisation (Zhang & Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.reference import CastOrder


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: CastOrder = "hf",
    residual: None = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: CastOrder = "hf",
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: CastOrder = "hf",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x`` by the root of its mean square over the last dimension.

    Args:
        x: ``[..., hidden]``, any strides.
        weight: ``[hidden]`` or None for no weight.
        eps: added to the mean square.
        zero_centered: multiply by ``1 + weight`` (Gemma, Qwen3-Next) instead of ``weight``.
        cast_order: where a half-precision result is rounded. ``"hf"``: the normalised value is rounded to ``x.dtype``,
            then multiplied by the weight (Llama, Qwen, …). ``"float32"``: everything in float32, one rounding (Gemma).
        residual: added to ``x`` first, same shape and dtype as ``x``.

    Returns:
        ``y`` of x's shape, or ``(y, x + residual)`` when a residual is given. ``y`` has x's dtype, except that in the
        ``"hf"`` order a weight of a wider dtype widens it, as the multiplication in PyTorch does.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    return reference.rms_norm(x, weight, eps=eps, zero_centered=zero_centered, cast_order=cast_order, residual=residual)
