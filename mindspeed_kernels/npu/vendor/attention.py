"""npu_fusion_attention, on whole batches (layout BSND) and packed sequences (TND).

It returns each softmax's maximum and sum, in eight copies. Its gradient reads them as ``exp(score - maximum) / sum``,
so that a maximum of logsumexp and a sum of 1 say the same: ours keeps the logsumexp alone, which callers may have
merged over several calls.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.npu.vendor._common import computable
from mindspeed_kernels.reference.flash_attention import check_flash_attention

_COPIES = 8
_MAX_DIM, _MAX_HEADS, _MAX_LENGTH, _MAX_PACKED = 768, 256, 2**20, 1024
# Of sparse_mode. Both count positions from the last query and the last key, as ours do by default.
_ALL, _CAUSAL, _BAND = 0, 3, 4


class _Sequences(NamedTuple):
    """Lengths of each sequence, and the key at which its first query sits."""

    queries: list[int]
    keys: list[int]
    offsets: list[int] | None  # None: the last query sits at the last key

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, offsets: Tensor | None
    ) -> _Sequences:
        positions = None if offsets is None else offsets.tolist()
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return cls([q.shape[1]] * q.shape[0], [k.shape[1]] * k.shape[0], positions)
        ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        queries, keys = ([end - begin for begin, end in itertools.pairwise(e)] for e in ends)
        return cls(queries, keys, positions)

    def at_the_end(self) -> bool:
        return self.offsets is None or self.offsets == [k - q for q, k in zip(self.queries, self.keys, strict=True)]

    def see_all(self) -> bool:
        """When only later keys are hidden."""
        return self.offsets is not None and all(p >= k - 1 for p, k in zip(self.offsets, self.keys, strict=True))


def takes(
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
) -> bool:
    check_flash_attention(q, k, v, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets)
    if softcap is not None or not computable(q, k, v) or not _fits(q, k, v):
        return False
    sequences = _Sequences.of(q, k, cu_seqlens_q, cu_seqlens_k, query_offsets)
    if cu_seqlens_q is not None and (
        sum(sequences.queries) < len(q) or sum(sequences.keys) < len(k) or len(sequences.queries) > _MAX_PACKED
    ):
        return False  # tokens outside of all sequences
    pairs = list(zip(sequences.queries, sequences.keys, strict=True))
    if any((queries == 0) != (keys == 0) for queries, keys in pairs):
        return False
    mode = _sparse_mode(sequences, causal, window)
    # A query that sees no key is left to others.
    return mode == _ALL or (mode is not None and all(queries <= keys for queries, keys in pairs))


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    lengths = max(q.shape[-3], k.shape[-3])
    return v.shape[-1] <= q.shape[-1] <= _MAX_DIM and q.shape[-2] <= _MAX_HEADS and lengths <= _MAX_LENGTH


def _sparse_mode(sequences: _Sequences, causal: bool, window: int | None) -> int | None:
    """The mode that hides the same keys, None if there is none."""
    if window is None and (not causal or sequences.see_all()):
        return _ALL
    if not sequences.at_the_end():
        return None
    return _CAUSAL if window is None else _BAND


def takes_backward(
    grad_out: Tensor, grad_logsumexp: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> bool:
    """The vendor's gradient has no place for one of the logsumexp."""
    _, _, *arguments = rest  # out, logsumexp
    return grad_logsumexp is None and takes(q, k, v, *arguments)


def _arguments(
    q: Tensor,
    k: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
    causal: bool,
    window: int | None,
) -> dict[str, Any]:
    """What forward and backward are told alike."""
    mode = _sparse_mode(_Sequences.of(q, k, cu_seqlens_q, cu_seqlens_k, query_offsets), causal, window)
    arguments: dict[str, Any] = {"sparse_mode": mode, "atten_mask": None if mode == _ALL else _hidden(q.device)}
    if mode == _BAND and window is not None:
        arguments |= {"pre_tockens": window - 1, "next_tockens": 0 if causal else window - 1}
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        arguments |= {
            "actual_seq_qlen": cu_seqlens_q.tolist()[1:],
            "actual_seq_kvlen": cu_seqlens_k.tolist()[1:],
            "softmax_layout": "TND",
        }
    return arguments | {"sink": None if sinks is None else sinks.float()}


@functools.cache
def _hidden(device: torch.device) -> Tensor:
    """The mask of later keys that all masked modes expect, whatever the lengths."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def forward(
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
    layout = "BSND" if cu_seqlens_q is None else "TND"
    arguments = _arguments(q, k, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, causal, window)
    out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(q, k, v, q.shape[-2], layout, scale=scale, **arguments)
    logsumexp = maximum[..., 0] + total[..., 0].log()  # [batch, num_heads, seq] or [tokens, num_heads]
    return out, logsumexp if cu_seqlens_q is None else logsumexp.T.contiguous()


def backward(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = "BSND" if cu_seqlens_q is None else "TND"
    arguments = _arguments(q, k, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, causal, window)
    maximum = logsumexp if cu_seqlens_q is None else logsumexp.T
    maximum = maximum.unsqueeze(-1).expand(*maximum.shape, _COPIES).contiguous()
    grad_q, grad_k, grad_v, _, grad_sinks = torch.ops.npu.npu_fusion_attention_grad(
        q,
        k,
        v,
        grad_out.contiguous(),
        q.shape[-2],
        layout,
        softmax_max=maximum,
        softmax_sum=torch.ones_like(maximum),
        attention_in=out,
        scale_value=scale,
        **arguments,
    )
    return grad_q, grad_k, grad_v, q.new_empty(0) if sinks is None else grad_sinks.to(sinks.dtype)


def reference_backward(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The written-out gradient of the definition."""
    grad_q, grad_k, grad_v, grad_sinks = reference.flash_attention_backward(
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
    return grad_q, grad_k, grad_v, q.new_empty(0) if grad_sinks is None else grad_sinks
