"""The experts of a mixture (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538): gated feed-forward layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.npu import experts as npu
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients


def fused_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Each token through the experts it is routed to, and the weighted sum of what they return.

    With expert ``e = top_k_index[t, j]``::

        gate, up = gate_up[e] @ x[t] + gate_up_bias[e]
        gate, up = min(gate, limit), clamp(up, -limit, limit)
        h = gate * sigmoid(alpha * gate) * (up + up_offset)
        y[t] = sum_j top_k_weights[t, j] * (down[e] @ h + down_bias[e])

    Args:
        x: ``[tokens, hidden]``.
        top_k_index: ``[tokens, top_k]``, int32 or int64, top_k at most 64. Experts outside ``[0, num_experts)``, which
            another rank holds, add nothing.
        top_k_weights: ``[tokens, top_k]``, any floating dtype.
        gate_up: ``[num_experts, 2 * intermediate, hidden]``, dtype of ``x``.
        down: ``[num_experts, hidden, intermediate]``, dtype of ``x``.
        gate_up_bias: ``[num_experts, 2 * intermediate]`` or None.
        down_bias: ``[num_experts, hidden]`` or None.
        transposed: gate_up is ``[num_experts, hidden, 2 * intermediate]``, down
            ``[num_experts, intermediate, hidden]`` (gpt-oss).
        interleaved: gate and up are the even and odd elements (gpt-oss) instead of the first and second half.
        alpha, limit, up_offset: of the activation; the defaults make it SwiGLU.

    Returns:
        ``[tokens, hidden]`` in x's dtype. Arithmetic and sums are float32; rounded are the sum of gate_up, the weighted
        activation, each expert's output and the result.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    limit = torch.inf if limit is None else limit
    arguments = (x, top_k_index, top_k_weights, gate_up, gate_up_bias, down, down_bias)
    options = (transposed, interleaved, alpha, limit, up_offset)
    if npu.takes(x, gate_up):
        return npu.fused_experts(*arguments, *options)
    if not has_kernel(x, top_k_weights, gate_up, gate_up_bias, down, down_bias):
        return reference.fused_experts(*arguments, *options)
    return torch.ops.mindspeed.fused_experts(*arguments, *options)[0]


@torch.library.register_fake("mindspeed::fused_experts")
def _(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    *activation: Any,
) -> tuple[Tensor, Tensor]:
    rows = top_k_index.shape[0] * top_k_index.shape[1]
    return x.new_empty(x.shape), x.new_empty(rows, gate_up.shape[2 if transposed else 1])


@torch.library.register_fake("mindspeed::fused_experts_backward")
def _(
    grad: Tensor,
    z: Tensor,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    parameter_gradients = options[-1]

    def like(parameter: Tensor | None) -> Tensor:
        return parameter.new_empty(parameter.shape) if parameter_gradients and parameter is not None else x.new_empty(0)

    parameters = map(like, (gate_up, gate_up_bias, down, down_bias))
    return x.new_empty(x.shape), top_k_weights.new_empty(top_k_weights.shape), *parameters


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:7], inputs[7:]
    _, z = output
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(z, *tensors)


def _backward(ctx: Any, grad: Tensor | None, grad_z: None) -> tuple[Tensor | None, ...]:
    z, *tensors = ctx.saved_tensors
    no_options = [None] * len(ctx.options)
    if grad is None:
        return *[None] * len(tensors), *no_options
    if torch.is_grad_enabled():  # create_graph=True

        def definition(*tensors: Any) -> Tensor:
            return reference.fused_experts(*tensors, *ctx.options)

        return *reference_gradients(definition, tensors, (grad,)), *no_options
    needed = ctx.needs_input_grad[3:7]  # gate_up, gate_up_bias, down, down_bias
    grad_x, grad_top_k_weights, *grads = torch.ops.mindspeed.fused_experts_backward(
        grad, z, *tensors, *ctx.options, any(needed)
    )
    parameters = (g if need else None for g, need in zip(grads, needed, strict=True))
    return grad_x, None, grad_top_k_weights, *parameters, *no_options


torch.library.register_autograd("mindspeed::fused_experts", _backward, setup_context=_setup)
forbid_gradient("fused_experts_backward")
