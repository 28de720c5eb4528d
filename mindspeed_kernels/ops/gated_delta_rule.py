"""Linear attention by the gated delta rule (Yang et al., 2024, https://arxiv.org/abs/2412.06464), also with a decay for
each channel (Kimi Linear, 2025, https://arxiv.org/abs/2510.26692)."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, on_host, reference_gradients


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor: ...


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Read and correct a memory of keys and values, token by token.

    Each value head has a state ``S``, ``[key_dim, value_dim]``, which every token of its sequence decays, corrects by
    what it gets wrong, and reads::

        S = exp(g) * S;  S = S + k (beta * (v - Sᵀ k))ᵀ;  out = scale * Sᵀ q

    Args:
        q: ``[batch, seq, key_heads, key_dim]``, any strides.
        k: shape and dtype of ``q``.
        v: ``[batch, seq, value_heads, value_dim]``, dtype of ``q``. ``value_heads`` is a multiple of ``key_heads``;
            neighbouring heads of ``v`` share one of ``q`` and ``k``.
        g: ``[batch, seq, value_heads]``, any floating dtype: the logarithm of the decay, at most 0; or ``[batch, seq,
            value_heads, key_dim]``: that of each row of the state.
        beta: ``[batch, seq, value_heads]``, any floating dtype: how much of the error is corrected, usually in 0 to 1.
        scale: factor of the output, ``key_dim ** -0.5`` by default.
        qk_l2norm: divide each vector x of ``q`` and ``k`` by ``sqrt(Σ x² + 1e-6)`` first.
        initial_state: ``[sequences, value_heads, key_dim, value_dim]``, any floating dtype; zeros by default.
        return_final_state: return the states after the last tokens as well.
        cu_seqlens: int32 or int64 ``[sequences + 1]``: where in the flattened ``batch * seq`` tokens each sequence
            starts, and the last one ends. By default each row of the batch is one. Sequences may be empty; ``out`` is 0
            for tokens outside of all.

    Returns:
        ``out``, shape and dtype of ``v``, the arithmetic in float32 (float64 for float64); or ``(out, final_state)``,
        final_state ``[sequences, value_heads, key_dim, value_dim]`` in the dtype of the arithmetic. Both can be
        differentiated.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    if not has_kernel(q, k, v, g, beta, initial_state):
        return reference.gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            qk_l2norm=qk_l2norm,
            initial_state=initial_state,
            return_final_state=return_final_state,
            cu_seqlens=cu_seqlens,
        )
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0  # without keys nothing is read
    out, final_state, _ = torch.ops.mindspeed.gated_delta_rule(
        q, k, v, g, beta, initial_state, on_host(cu_seqlens), scale, qk_l2norm, return_final_state
    )
    return (out, final_state) if return_final_state else out


_TOKENS_PER_CHECKPOINT = 1024
"""Of how many tokens the kernel keeps a state for its gradient."""


@torch.library.register_fake("mindspeed::gated_delta_rule")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    return_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    state = (v.shape[2], q.shape[3], v.shape[3])
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final_state = v.new_empty((sequences if return_final_state else 0, *state), dtype=torch.float32)
    checkpoints = v.new_empty((q.shape[0] * q.shape[1] // _TOKENS_PER_CHECKPOINT, *state), dtype=torch.float32)
    return v.new_empty(v.shape), final_state, checkpoints


@torch.library.register_fake("mindspeed::gated_delta_rule_backward")
def _(
    grad_out: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    if initial_state is None:
        grad_initial_state = v.new_empty((0, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
    else:
        grad_initial_state = initial_state.new_empty(initial_state.shape)
    return *(t.new_empty(t.shape) for t in (q, k, v, g, beta)), grad_initial_state


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.qk_l2norm, ctx.return_final_state = inputs
    _, _, checkpoints = output
    ctx.save_for_backward(*tensors, checkpoints)
    ctx.mark_non_differentiable(checkpoints)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_final_state: Tensor | None, grad_checkpoints: None
) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, initial_state, cu_seqlens, checkpoints = ctx.saved_tensors
    constants = (None,) * 4
    if not ctx.return_final_state:
        grad_final_state = None
    if grad_out is None and grad_final_state is None:
        return (None,) * 10
    if torch.is_grad_enabled():  # create_graph=True

        def apply(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
        ) -> Tensor | tuple[Tensor, Tensor]:
            return reference.gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                scale=ctx.scale,
                qk_l2norm=ctx.qk_l2norm,
                initial_state=initial_state,
                return_final_state=True,
                cu_seqlens=cu_seqlens,
            )

        inputs = (q, k, v, g, beta, initial_state)
        return *reference_gradients(apply, inputs, (grad_out, grad_final_state)), *constants
    if grad_out is None:
        grad_out = v.new_zeros(()).expand_as(v)
    *grads, grad_initial_state = torch.ops.mindspeed.gated_delta_rule_backward(
        grad_out,
        grad_final_state,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        checkpoints,
        ctx.scale,
        ctx.qk_l2norm,
    )
    return *grads, None if initial_state is None else grad_initial_state, *constants


torch.library.register_autograd("mindspeed::gated_delta_rule", _backward, setup_context=_setup)
forbid_gradient("gated_delta_rule_backward")
