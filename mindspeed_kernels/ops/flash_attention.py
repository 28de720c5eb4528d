"""Softmax attention that never holds all scores (Dao et al., 2022, https://arxiv.org/abs/2205.14135)."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    return_logsumexp: Literal[False] = False,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    return_logsumexp: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend: ``softmax(scale * q kᵀ) v`` over the keys that each query may see.

    Which those are, one rule says. Query ``i`` of a sequence sits at key ``p = i + offset`` and sees key ``j`` if

    * ``j <= p``, when ``causal``;
    * ``p - window < j``, with a window, and ``j < p + window``, which matters when not ``causal``.

    A sequence's offset is ``seq_k - seq_q`` by default, so that the last query sits at the last key.

    Args:
        q: ``[batch, seq_q, num_heads, head_dim]``, any strides; or packed, ``[tokens_q, num_heads, head_dim]``.
        k: ``[batch, seq_k, num_kv_heads, head_dim]`` or ``[tokens_k, num_kv_heads, head_dim]``, dtype of ``q``.
            ``num_heads`` is a multiple of ``num_kv_heads``; neighbouring heads of ``q`` share one of ``k`` and ``v``.
        v: ``[batch, seq_k, num_kv_heads, value_dim]`` or ``[tokens_k, num_kv_heads, value_dim]``, dtype of ``q``.
        causal: whether queries see no later keys.
        scale: factor of the scores, ``head_dim ** -0.5`` by default.
        window: how many keys a query sees at most when causal, its own included.
        softcap: bounds the scores smoothly, ``softcap * tanh(scores / softcap)`` (Gemma 2).
        sinks: ``[num_heads]``, any floating dtype: one more logit in each softmax, which has no value (gpt-oss).
        cu_seqlens_q, cu_seqlens_k: for the packed layout, int32 or int64 ``[sequences + 1]``: where in ``q`` and in
            ``k`` and ``v`` each sequence starts, and the last one ends. Sequences may be empty; tokens outside of all
            of them neither see nor are seen.
        query_offsets: int64 ``[batch]`` or ``[sequences]``, the offset of each sequence's queries; may be negative.
        return_logsumexp: return the logarithm of each softmax's denominator as well.

    Returns:
        ``out``, ``[..., num_heads, value_dim]`` in q's dtype, the sums formed in float32; or ``(out, logsumexp)``,
        logsumexp float32 ``[batch, num_heads, seq_q]`` or ``[num_heads, tokens_q]``, natural, sinks included. Both can
        be differentiated. A query that sees no key gives 0, and -inf unless there are sinks, and passes no gradient.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    options = (
        sinks,
        *_sequences(cu_seqlens_q, cu_seqlens_k, query_offsets),
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        window,
        softcap,
    )
    if not has_kernel(q, k, v, sinks, call=("flash_attention_forward", q, k, v, *options)):
        return reference.flash_attention(
            q,
            k,
            v,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            query_offsets=query_offsets,
            return_logsumexp=return_logsumexp,
        )
    out, logsumexp = torch.ops.mindspeed.flash_attention_forward(q, k, v, *options)
    return (out, logsumexp) if return_logsumexp else out


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, logsumexp)`` of :func:`flash_attention`, without a graph, for callers that differentiate themselves."""
    return flash_attention(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        query_offsets=query_offsets,
        return_logsumexp=True,
    )


@torch.no_grad()
def backward(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and sinks (None without sinks), each in the dtype of what it belongs to.

    ``out`` and ``logsumexp`` may be those of more keys than these: with the output and logsumexp merged over several
    calls to :func:`forward`, the gradients of the calls add up to those of one call with all keys. The gradient of
    sinks is then whole in each call, not a share: ask for it once.
    """
    options = (
        sinks,
        *_sequences(cu_seqlens_q, cu_seqlens_k, query_offsets),
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        window,
        softcap,
    )
    call = ("flash_attention_backward", grad_out, grad_logsumexp, q, k, v, out, logsumexp, *options)
    if not has_kernel(q, k, v, sinks, call=call):
        return reference.flash_attention_backward(
            grad_out,
            grad_logsumexp,
            q,
            k,
            v,
            out,
            logsumexp,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            query_offsets=query_offsets,
        )
    *grads, grad_sinks = torch.ops.mindspeed.flash_attention_backward(
        grad_out, grad_logsumexp, q, k, v, out, logsumexp, *options
    )
    return *grads, None if sinks is None else grad_sinks


def _sequences(*arguments: Tensor | None) -> tuple[Tensor | None, ...]:
    """What is read while a kernel is set up lies in the host's memory."""
    return tuple(None if t is None else t.cpu() for t in arguments)


@torch.library.register_fake("mindspeed::flash_attention_forward")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    *leading, num_heads, _ = q.shape  # [batch, seq] or [tokens]
    logsumexp = q.new_empty((*leading[:-1], num_heads, leading[-1]), dtype=torch.float32)
    return q.new_empty((*leading, num_heads, v.shape[-1])), logsumexp


@torch.library.register_fake("mindspeed::flash_attention_backward")
def _(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, out, logsumexp = ctx.saved_tensors
    scale, causal, window, softcap = ctx.options
    constants = (None,) * 7
    if torch.is_grad_enabled():  # create_graph=True

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
            return reference.flash_attention(
                q,
                k,
                v,
                causal=causal,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                query_offsets=query_offsets,
                return_logsumexp=True,
            )

        return *reference_gradients(attend, (q, k, v, sinks), (grad_out, grad_logsumexp)), *constants
    if grad_out is None:
        grad_out = out.new_zeros(()).expand_as(out)
    *grads, grad_sinks = torch.ops.mindspeed.flash_attention_backward(
        grad_out,
        grad_logsumexp,
        q,
        k,
        v,
        out,
        logsumexp,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        query_offsets,
        scale,
        causal,
        window,
        softcap,
    )
    return *grads, None if sinks is None else grad_sinks, *constants


torch.library.register_autograd("mindspeed::flash_attention_forward", _backward, setup_context=_setup)
forbid_gradient("flash_attention_backward")
