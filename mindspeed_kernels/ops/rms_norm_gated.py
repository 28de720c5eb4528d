"""RMSNorm with a gate, behind linear attention (Dao & Gu, 2024, https://arxiv.org/abs/2405.21060, norm before gate)."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients
from mindspeed_kernels.reference import GateActivation


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float = 1e-6, activation: GateActivation = "silu"
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight * activation(gate)`` over the last dimension, with one rounding.

    Args:
        x: ``[..., hidden]``, any strides.
        gate: shape and dtype of ``x``.
        weight: ``[hidden]``.
        eps: added to the mean square.
        activation: ``"silu"`` (Qwen3-Next) or ``"sigmoid"`` (Kimi Linear).

    Returns:
        ``y`` of x's shape and dtype, whatever the weight's.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
        ValueError: ``activation`` is none of the two.
    """
    if activation not in get_args(GateActivation):
        raise ValueError(f"activation is {activation!r}, but must be one of {', '.join(get_args(GateActivation))}")
    if not has_kernel(x, gate, weight):
        return reference.rms_norm_gated(x, gate, weight, eps=eps, activation=activation)
    y, _ = torch.ops.mindspeed.rms_norm_gated(x, gate, weight, eps, activation == "sigmoid")
    return y


@torch.library.register_fake("mindspeed::rms_norm_gated")
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("mindspeed::rms_norm_gated_backward")
def _(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, sigmoid: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, ctx.eps, ctx.sigmoid = inputs
    _, rstd = output
    ctx.save_for_backward(x, gate, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_y: Tensor | None, grad_rstd: None) -> tuple[Tensor | None, ...]:
    constants = (None, None)
    if grad_y is None:
        return None, None, None, *constants
    x, gate, weight, rstd = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True

        def normalize(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            activation: GateActivation = "sigmoid" if ctx.sigmoid else "silu"
            return reference.rms_norm_gated(x, gate, weight, eps=ctx.eps, activation=activation)

        return *reference_gradients(normalize, (x, gate, weight), (grad_y,)), *constants
    return *torch.ops.mindspeed.rms_norm_gated_backward(grad_y, x, gate, weight, rstd, ctx.sigmoid), *constants


torch.library.register_autograd("mindspeed::rms_norm_gated", _backward, setup_context=_setup)
forbid_gradient("rms_norm_gated_backward")
