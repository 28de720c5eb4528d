"""What the attention kernels of ``csrc/ascend/kernels`` are given besides their tensors, for :mod:`ascend_twin`.

The structures are those of ``flash_attention_tiling.h``.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

FORWARD, QUERY_GRADIENT, KEY_GRADIENT = range(3)  # AttentionKernel


class AttentionTiling(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("queries", "blocks")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("causal", ctypes.c_bool),
        ("has_sinks", ctypes.c_bool),
        ("window", ctypes.c_int64),
        ("per_core", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
    )


def attention_tiling(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[AttentionTiling, list[int], list[int]]:
    """What all attention kernels are told, and where sequences begin and end."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    shape = q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.shape[0]
    tiling = AttentionTiling(*shape, 0, scale, softcap or 0.0, causal, False, window or 0)
    ends_q = [0, q.shape[0]] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    ends_k = [0, k.shape[0]] if cu_seqlens_k is None else cu_seqlens_k.tolist()
    return tiling, ends_q, ends_k


def _sequences(
    ends_q: list[int], ends_k: list[int], offsets: Tensor | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """First and last row of each sequence's queries and keys, and the key at which its first query sits."""
    for i, ((query, end_q), (key, end_k)) in enumerate(
        zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True)
    ):
        default = (end_k - key) - (end_q - query)
        yield query, end_q, key, end_k, default if offsets is None else int(offsets[i])


def query_blocks(ends_q: list[int], ends_k: list[int], offsets: Tensor | None, per_block: int) -> Tensor:
    """QueryBlock for all queries."""
    rows = [
        (start, min(per_block, end_q - start), key, end_k - key, offset + start - query)
        for query, end_q, key, end_k, offset in _sequences(ends_q, ends_k, offsets)
        for start in range(query, end_q, per_block)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)


def key_blocks(ends_q: list[int], ends_k: list[int], offsets: Tensor | None, per_block: int) -> Tensor:
    """KeyBlock for all keys."""
    rows = [
        (start, min(per_block, end_k - start), start - key, query, end_q - query, offset)
        for query, end_q, key, end_k, offset in _sequences(ends_q, ends_k, offsets)
        for start in range(key, end_k, per_block)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
