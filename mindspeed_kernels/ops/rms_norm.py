"""Root-mean-square normalisation (Zhang & Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from typing import Any, get_args, overload

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients
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
        ValueError: ``cast_order`` is none of the two.
    """
    if cast_order not in get_args(CastOrder):
        raise ValueError(f"cast_order is {cast_order!r}, but must be one of {', '.join(get_args(CastOrder))}")
    options = (weight, eps, zero_centered, cast_order == "hf")
    call = ("rms_norm", x, *options) if residual is None else ("add_rms_norm", x, residual, *options)
    if not has_kernel(x, weight, residual, call=call):
        if residual is None:
            return reference.rms_norm(x, weight, eps=eps, zero_centered=zero_centered, cast_order=cast_order)
        return reference.add_rms_norm(x, residual, weight, eps=eps, zero_centered=zero_centered, cast_order=cast_order)
    if residual is None:
        y, _ = torch.ops.mindspeed.rms_norm(x, *options)
        return y
    y, total, _ = torch.ops.mindspeed.add_rms_norm(x, residual, *options)
    return y, total


def _output_dtype(x: Tensor, weight: Tensor | None, round_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if round_before_weight and weight is not None else x.dtype


@torch.library.register_fake("mindspeed::rms_norm")
def _(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_output_dtype(x, weight, round_before_weight))
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("mindspeed::add_rms_norm")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, round_before_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_output_dtype(x, weight, round_before_weight))
    return y, x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("mindspeed::rms_norm_backward")
def _(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    round_before_weight: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    has_gradient = weight is not None and weight_gradient
    grad_weight = (x if weight is None else weight).new_empty(x.shape[-1] if has_gradient else 0)
    return x.new_empty(x.shape), grad_weight


def _setup_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *ctx.options = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _setup_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, *ctx.options = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad_y: Tensor | None, grad_sum: Tensor | None, weight_gradient: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of what is normalised and of the weight."""
    if grad_y is None:
        return grad_sum, None
    x, weight, rstd = ctx.saved_tensors
    eps, zero_centered, round_before_weight = ctx.options
    if torch.is_grad_enabled():  # create_graph=True

        def normalize(x: Tensor, weight: Tensor | None) -> Tensor:
            cast_order: CastOrder = "hf" if round_before_weight else "float32"
            return reference.rms_norm(x, weight, eps=eps, zero_centered=zero_centered, cast_order=cast_order)

        grad_x, grad_weight = reference_gradients(normalize, (x, weight), (grad_y,))
        return (grad_x if grad_sum is None or grad_x is None else grad_x + grad_sum), grad_weight
    grad_x, grad_weight = torch.ops.mindspeed.rms_norm_backward(
        grad_y, grad_sum, x, weight, rstd, zero_centered, round_before_weight, weight_gradient
    )
    return grad_x, grad_weight if weight_gradient else None


def _backward_rms_norm(ctx: Any, grad_y: Tensor | None, grad_rstd: None) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight = _gradients(ctx, grad_y, None, ctx.needs_input_grad[1])
    return grad_x, grad_weight, None, None, None


def _backward_add_rms_norm(
    ctx: Any, grad_y: Tensor | None, grad_sum: Tensor | None, grad_rstd: None
) -> tuple[Tensor | None, ...]:
    grad, grad_weight = _gradients(ctx, grad_y, grad_sum, ctx.needs_input_grad[2])
    return grad, grad, grad_weight, None, None, None


torch.library.register_autograd("mindspeed::rms_norm", _backward_rms_norm, setup_context=_setup_rms_norm)
torch.library.register_autograd("mindspeed::add_rms_norm", _backward_add_rms_norm, setup_context=_setup_add_rms_norm)
forbid_gradient("rms_norm_backward")
