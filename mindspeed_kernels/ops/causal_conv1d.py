"""The short convolution along the sequence that linear attention has in front of it, one filter per channel."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, on_host, reference_gradients


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = "silu",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``y[t, c] = activation(bias[c] + Σ_w weight[c, w] · x[t - width + 1 + w, c])``, 0 before the sequence begins.

    Args:
        x: ``[batch, seq, channels]``, any strides.
        weight: ``[channels, width]``, the last column that of the token itself; may have another dtype than ``x``.
        bias: ``[channels]`` in weight's dtype, or None.
        activation: ``"silu"`` or None, applied before the one rounding.
        cu_seqlens: int32 or int64 ``[sequences + 1]``: where in the flattened ``batch * seq`` tokens each sequence
            starts, and the last one ends. By default each row of the batch is one. No sequence sees another, ``y`` is
            0 for tokens outside of all.

    Returns:
        ``y`` of x's shape and dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
        ValueError: ``activation`` is none of the two.
    """
    if activation not in ("silu", None):
        raise ValueError(f'activation is {activation!r}, but must be "silu" or None')
    if not has_kernel(x, weight, bias):
        return reference.causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
    return torch.ops.mindspeed.causal_conv1d(x, weight, bias, activation == "silu", on_host(cu_seqlens))


@torch.library.register_fake("mindspeed::causal_conv1d")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("mindspeed::causal_conv1d_backward")
def _(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if bias is None else bias.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.silu, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, bias, cu_seqlens)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, cu_seqlens = ctx.saved_tensors
    constants = (None, None)
    if torch.is_grad_enabled():  # create_graph=True

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            activation: Literal["silu"] | None = "silu" if ctx.silu else None
            return reference.causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)

        return *reference_gradients(convolve, (x, weight, bias), (grad_y,)), *constants
    grad_x, grad_weight, grad_bias = torch.ops.mindspeed.causal_conv1d_backward(
        grad_y, x, weight, bias, ctx.silu, cu_seqlens
    )
    return grad_x, grad_weight, None if bias is None else grad_bias, *constants


torch.library.register_autograd("mindspeed::causal_conv1d", _backward, setup_context=_setup)
forbid_gradient("causal_conv1d_backward")
