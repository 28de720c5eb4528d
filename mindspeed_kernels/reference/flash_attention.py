"""Softmax attention, and its gradient in the form that fused kernels use.

Autograd differentiates the definition. The gradient is also written out, from the output and the logsumexp: callers
that attend to the keys in several calls (ring context parallelism) pass what they have merged of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kernels.reference._common import widened


@dataclass(frozen=True)
class _Logits:
    """How queries, keys and their places in the sequence become the logits of the softmax."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, q: Tensor, k: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | float]:
        """The logits, -inf for invisible keys, and their derivative with respect to ``scale * q·k``.

        ``q`` is ``[batch, seq_q, num_heads, head_dim]``, ``offsets`` ``[batch]``, the result
        ``[batch, num_kv_heads, group, seq_q, seq_k]`` in the dtype of the arithmetic.
        """
        grouped = widened(q).unflatten(2, (k.shape[2], -1))
        logits = self.scale * torch.einsum("bqhgd,bkhd->bhgqk", grouped, widened(k))
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            bounded = torch.tanh(logits / self.softcap)
            logits, slope = self.softcap * bounded, 1 - bounded.square()
        visible = self._visible(q.shape[1], k.shape[1], offsets)
        return logits.masked_fill(~visible[:, None, None], -torch.inf), slope

    def _visible(self, seq_q: int, seq_k: int, offsets: Tensor) -> Tensor:
        """``[batch, seq_q, seq_k]``; query i sits at key ``i + offset``."""
        position = offsets[:, None] + torch.arange(seq_q, device=offsets.device)
        distance = position[:, :, None] - torch.arange(seq_k, device=offsets.device)
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            visible = visible & (distance < self.window) & (distance > -self.window)
        return visible


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
    """``softmax(scale * q kᵀ) v`` over the visible keys; see :func:`mindspeed_kernels.flash_attention`."""
    check_flash_attention(q, k, v, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets)
    logits_of = _Logits(causal, q.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
    outs, logsumexps = [], []
    for q_, k_, v_, offsets in zip(
        *_sequences((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)),
        _offsets(q, k, cu_seqlens_q, cu_seqlens_k, query_offsets),
        strict=True,
    ):
        logits, _ = logits_of(q_, k_, offsets)
        logits = torch.cat((logits, _sink_column(sinks, logits)), -1)
        maximum = logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
        terms = torch.exp(logits - maximum)
        total = terms.sum(-1, keepdim=True)
        blind = total == 0  # this query sees no key
        total = total.masked_fill(blind, 1.0)
        out = torch.einsum("bhgqk,bkhe->bqhge", terms[..., :-1] / total, widened(v_))
        outs.append(out.flatten(2, 3).to(q.dtype))
        logsumexp = (maximum + total.log()).masked_fill(blind, -torch.inf)
        logsumexps.append(logsumexp.squeeze(-1).flatten(1, 2))  # [batch, num_heads, seq_q]
    out = _join(outs, q.shape[0], cu_seqlens_q)
    if not return_logsumexp:
        return out
    return out, _join(logsumexps, q.shape[0], cu_seqlens_q, dim=1, outside=-torch.inf)


def flash_attention_backward(
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
    """The gradients of q, k, v and sinks; see :func:`mindspeed_kernels.ops.flash_attention.backward`."""
    check_flash_attention(q, k, v, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits_of = _Logits(causal, scale, window, softcap)
    # dL/dlogit = p · (dL/dp − Σ dL/dout · out + dL/dlogsumexp)
    delta = (widened(grad_out) * widened(out)).sum(-1).movedim(-1, -2)  # as logsumexp: [..., num_heads, seq_q]
    if grad_logsumexp is not None:
        delta = delta - grad_logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)
    denominator = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)  # so that exp(logit - denominator) is 0
    grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for q_, k_, v_, grad_out_, offsets, delta_, denominator_ in zip(
        *_sequences((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k), (grad_out, cu_seqlens_q)),
        _offsets(q, k, cu_seqlens_q, cu_seqlens_k, query_offsets),
        *_sequences((delta, cu_seqlens_q), (denominator, cu_seqlens_q), dim=1),
        strict=True,
    ):
        group = (k_.shape[2], -1)
        logits, slope = logits_of(q_, k_, offsets)
        p = torch.exp(logits - denominator_.unflatten(1, group)[..., None])
        grad_heads = widened(grad_out_).unflatten(2, group)
        grad_p = torch.einsum("bqhge,bkhe->bhgqk", grad_heads, widened(v_))
        grad_scores = scale * slope * p * (grad_p - delta_.unflatten(1, group)[..., None])
        grad_q = torch.einsum("bhgqk,bkhd->bqhgd", grad_scores, widened(k_)).flatten(2, 3)
        grad_k = torch.einsum("bhgqk,bqhgd->bkhd", grad_scores, widened(q_).unflatten(2, group))
        grad_v = torch.einsum("bhgqk,bqhge->bkhe", p, grad_heads)
        for found, grad in zip(grads, (grad_q, grad_k, grad_v), strict=True):
            found.append(grad.to(q.dtype))
    grad_q = _join(grads[0], q.shape[0], cu_seqlens_q)
    grad_k, grad_v = (_join(found, k.shape[0], cu_seqlens_k) for found in grads[1:])
    if sinks is None:
        return grad_q, grad_k, grad_v, None
    grad_sinks = -delta * torch.exp(sinks.to(delta.dtype)[:, None] - denominator)
    over_all = (-1,) if cu_seqlens_q is not None else (0, -1)
    return grad_q, grad_k, grad_v, grad_sinks.sum(over_all).to(sinks.dtype)


def _sequences(*tensors: tuple[Tensor, Tensor | None], dim: int = 0) -> list[list[Tensor]]:
    """Each tensor as a list of ``[batch, ...]``: of itself, or of its packed sequences (along ``dim``) one by one."""
    return [
        [t] if cu_seqlens is None else [part.unsqueeze(0) for part in _cut(t, cu_seqlens, dim)[1:-1]]
        for t, cu_seqlens in tensors
    ]


def _cut(tensor: Tensor, cu_seqlens: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The rows before the first sequence, the sequences, the rows after the last."""
    ends = [0, *cu_seqlens.tolist(), tensor.shape[dim]]
    return tensor.split([end - start for start, end in itertools.pairwise(ends)], dim)


def _join(parts: list[Tensor], rows: int, cu_seqlens: Tensor | None, *, dim: int = 0, outside: float = 0.0) -> Tensor:
    """Undo :func:`_sequences` for a result; rows outside of all sequences are filled."""
    if cu_seqlens is None:
        return parts[0]
    joined = torch.cat([part.squeeze(0) for part in parts], dim)
    padding = [int(cu_seqlens[0]), rows - int(cu_seqlens[-1])]
    return F.pad(joined, [0, 0] * (joined.dim() - 1 - dim) + padding, value=outside)


def _offsets(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, query_offsets: Tensor | None
) -> list[Tensor]:
    """For each of the :func:`_sequences`, the key index ``[batch]`` at which its first query sits."""
    if query_offsets is not None:
        offsets = query_offsets.to(q.device, torch.int64)
    elif cu_seqlens_q is not None and cu_seqlens_k is not None:
        offsets = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).to(q.device, torch.int64)
    else:
        offsets = torch.full((q.shape[0],), k.shape[1] - q.shape[1], device=q.device)
    return [offsets] if cu_seqlens_q is None else list(offsets.unsqueeze(1))


def _sink_column(sinks: Tensor | None, logits: Tensor) -> Tensor:
    """One more logit for every query: its head's sink, or -inf, which changes no softmax."""
    column = (*logits.shape[:-1], 1)
    if sinks is None:
        return logits.new_full(column, -torch.inf)
    return sinks.to(logits.dtype).view(1, *logits.shape[1:3], 1, 1).expand(column)


def check_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
) -> None:
    """Raise a RuntimeError that names the arguments which do not fit together."""
    packed = cu_seqlens_q is not None
    _check(packed == (cu_seqlens_k is not None), lambda: "cu_seqlens_q and cu_seqlens_k come together, or neither")
    rows = "tokens" if packed else "batch, seq"
    _check(
        q.dim() == k.dim() == v.dim() == (3 if packed else 4)
        and (packed or q.shape[0] == k.shape[0])
        and q.shape[-1] == k.shape[-1]
        and k.shape[:-1] == v.shape[:-1]
        and k.shape[-2] > 0
        and q.shape[-2] % k.shape[-2] == 0,
        lambda: (
            f"q [{rows}, num_heads, head_dim], k [{rows}, num_kv_heads, head_dim] and v [{rows}, num_kv_heads, "
            "value_dim], num_heads a multiple of num_kv_heads, do not fit together: "
            f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        ),
    )
    _check(
        q.dtype == k.dtype == v.dtype,
        lambda: f"q, k and v must have one dtype, but have {q.dtype}, {k.dtype} and {v.dtype}",
    )
    _check(window is None or window >= 1, lambda: f"window must be at least 1, the query's own key, but is {window}")
    _check(softcap is None or softcap > 0, lambda: f"softcap must be above 0, but is {softcap}")
    if sinks is not None:
        _check_shape("sinks", sinks, q.shape[-2], "for every head of q")
    sequences = q.shape[0]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        sequences = cu_seqlens_q.numel() - 1
        _check_shape("cu_seqlens_k", cu_seqlens_k, sequences + 1, "as for cu_seqlens_q")
    if query_offsets is not None:
        _check_shape("query_offsets", query_offsets, sequences, "for every sequence")


def _check(condition: bool, message: Callable[[], str]) -> None:
    torch._check(condition, lambda: f"flash_attention: {message()}")


def _check_shape(name: str, tensor: Tensor, length: int, what: str) -> None:
    _check(
        tensor.shape == (length,),
        lambda: f"{name} must be [{length}], one {what}, but is {list(tensor.shape)}",
    )


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, tokens: int) -> None:
    _check(
        cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 2 and cu_seqlens.dtype in (torch.int32, torch.int64),
        lambda: (
            f"{name} must be [sequences + 1] of int32 or int64, but is {list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        ),
    )
    ends = cu_seqlens.tolist()
    _check(
        ends[0] >= 0 and ends[-1] <= tokens and all(a <= b for a, b in itertools.pairwise(ends)),
        lambda: f"{name} must rise from 0 to at most {tokens}, the number of tokens, but is {ends}",
    )
