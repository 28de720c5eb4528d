"""The masks of transformers as `flash_attention` takes them: a causal flag, a window and the ends of the sequences.

transformers describes a mask by a function of two positions, put together from a few parts: causal, a sliding window,
documents of a packed row, chunks. Evaluated for all pairs they make the matrix that a fused operator is there to avoid.
So the parts are read instead. They are closures; which one a function is, its code says, which all closures made in one
place share. A part that is none of these is refused: nothing is masked by guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Any]


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees, made once for all layers that share it; what their `attention_mask` is.

    Without `cu_seqlens_q` and `cu_seqlens_k` the rows of the batch are the sequences. With them, sequences are runs of
    the flattened batch, `[batch * seq]`, or of its elements `query_index` and `key_index`, which leave out padding.
    """

    causal: bool
    window: int | None = None
    query_offsets: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    unpacked: bool = False
    """The batch came with an `attention_mask`: by transformers' rule its rows then are not packed, whatever their
    position ids."""


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> AttentionMask:
    """What transformers' `AttentionMaskInterface` calls, once per kind of mask and forward of the model.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key, with a cache.
        attention_mask: bool `[batch, positions]`, False for padding.

    Raises:
        ValueError: for a mask that `flash_attention` cannot honour.
    """
    if isinstance(q_offset, Tensor):
        raise ValueError("attention 'mindspeed' does not work with a static cache; use a dynamic one")
    parts = read_mask(mask_function)
    first_query = q_offset - kv_offset  # the key at which it sits
    square = q_length == kv_length and first_query == 0
    is_key = None if attention_mask is None else _columns(attention_mask, kv_offset, kv_length)
    if is_key is not None and is_key.all():
        is_key = None
    segments = _segments(parts, batch_size, kv_length, device)

    if segments is None and is_key is None:
        offsets = None if square else torch.full((batch_size,), first_query)
        return AttentionMask(parts.causal, parts.window, offsets, unpacked=attention_mask is not None)
    if square:
        return _mask_of_sequences(parts, segments, is_key, batch_size, q_length, device)
    if segments is not None or is_key is None:
        raise ValueError("packed or chunked attention needs as many queries as keys: it does not work with a cache")
    return _mask_with_cache(parts, is_key, first_query, q_length)


def separate_documents(mask: AttentionMask, position_ids: Tensor, batch: int) -> AttentionMask:
    """The mask for packed rows, if `position_ids` `[batch or 1, seq]` tell of documents that it knows nothing of.

    Some models make their masks without position ids (gpt-oss, Granite): there packed documents see each other with
    every implementation of transformers.
    """
    ends = ends_of_documents(position_ids, batch)
    return mask if ends is None else replace(mask, cu_seqlens_q=ends, cu_seqlens_k=ends)


def ends_of_documents(position_ids: Tensor, batch: int) -> Tensor | None:
    """`cu_seqlens` of the documents in the flattened `[batch, seq]`; None if no row has more than one."""
    documents = masking_utils.find_packed_sequence_indices(position_ids)
    if documents is None:
        return None
    return _ends_of_runs(_rows(batch, documents.shape[1], documents.device, documents.expand(batch, -1)[..., None]))


@dataclass
class MaskParts:
    """What a mask function is the intersection of."""

    causal: bool = False
    window: int | None = None
    two_sided: bool = False
    """Of the window: it reaches as far ahead as back."""
    documents: Tensor | None = None
    """`[batch, seq]`, a number for each document."""
    positions: Tensor | None = None
    """`[batch, seq]`, within the documents."""
    chunk_size: int | None = None
    left_padding: Tensor | None = None


def _code(function: MaskFunction) -> CodeType:
    return function.__code__


_AND = _code(masking_utils.and_masks())
_WINDOW = _code(masking_utils.sliding_window_overlay(1))
_TWO_SIDED_WINDOW = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_CHUNKS = _code(masking_utils.chunked_overlay(1, torch.empty(0)))
_DOCUMENTS = _code(masking_utils.packed_sequence_mask_function(torch.empty(0)))
_WITHIN_DOCUMENTS = _code(
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, torch.empty(0))
)


def read_mask(function: MaskFunction) -> MaskParts:
    """What a mask function of transformers says; ValueError if it is made of parts that are not known."""
    parts = MaskParts()
    _collect(function, parts)
    if parts.window is not None and parts.causal == parts.two_sided:
        raise ValueError("a window that is neither causal nor symmetric is not supported by attention 'mindspeed'")
    return parts


def _collect(function: MaskFunction, parts: MaskParts) -> None:
    code = getattr(function, "__code__", None)
    if function is masking_utils.bidirectional_mask_function:
        return
    if function is masking_utils.causal_mask_function:
        parts.causal = True
        return
    cells = getattr(function, "__closure__", None) or ()
    captured = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    if code is _AND:
        for part in captured["mask_functions"]:
            _collect(part, parts)
    elif code is _WINDOW:
        parts.window = captured["sliding_window"]  # keys, the query's own included
    elif code is _TWO_SIDED_WINDOW:
        parts.window, parts.two_sided = captured["sliding_window"] + 1, True
    elif code is _CHUNKS:
        parts.chunk_size, parts.left_padding = captured["chunk_size"], captured["left_padding"]
    elif code is _DOCUMENTS:
        parts.documents = captured["packed_sequence_mask"]
    elif code is _WITHIN_DOCUMENTS:  # positions in one document are as far apart as in the row
        parts.positions = captured["position_ids"]
        _collect(captured["mask_function"], parts)
    else:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"attention 'mindspeed' does not know the mask function {name}: it honours causal and full attention, "
            "sliding windows, padding, packed documents and chunks; use attn_implementation='sdpa' or 'eager'"
        )


def _columns(attention_mask: Tensor, start: int, length: int) -> Tensor:
    """The part of `[batch, positions]` that the keys or queries have; what lies beyond is padding."""
    columns = attention_mask[:, start : start + length].bool()
    return torch.nn.functional.pad(columns, (0, length - columns.shape[1]))


def _segments(parts: MaskParts, batch: int, seq: int, device: torch.device | str) -> Tensor | None:
    """`[batch, seq, 2]`, the document and the chunk of each position; None if every row is all one segment."""
    if parts.documents is None and parts.chunk_size is None:
        return None
    documents = torch.zeros(batch, seq, dtype=torch.int64, device=device)
    chunks = torch.zeros_like(documents)
    if parts.documents is not None:
        documents = parts.documents.expand(batch, seq)
    if parts.chunk_size is not None:
        positions = parts.positions
        if positions is None:
            assert parts.left_padding is not None
            positions = torch.arange(seq, device=device) - parts.left_padding[:, None]
        chunks = torch.div(positions, parts.chunk_size, rounding_mode="floor").expand(batch, seq)
    return torch.stack((documents, chunks), -1)


def _mask_of_sequences(
    parts: MaskParts, segments: Tensor | None, is_token: Tensor | None, batch: int, seq: int, device: torch.device | str
) -> AttentionMask:
    """Every query is a key: the tokens of a segment of a row make a sequence."""
    names = _rows(batch, seq, device, segments)
    index = None
    if is_token is not None:
        _check_runs(parts, is_token)
        index = is_token.flatten().nonzero().squeeze(1)
        names = names[index]
    ends = _ends_of_runs(names)
    return AttentionMask(
        parts.causal, parts.window, cu_seqlens_q=ends, cu_seqlens_k=ends, query_index=index, key_index=index
    )


def _rows(batch: int, seq: int, device: torch.device | str, segments: Tensor | None) -> Tensor:
    """`[batch * seq, names]`, equal for the tokens of one segment of one row."""
    row = torch.arange(batch, device=device)[:, None, None].expand(batch, seq, 1)
    return (row if segments is None else torch.cat((row, segments), -1)).flatten(0, 1)


def _ends_of_runs(names: Tensor) -> Tensor:
    """`cu_seqlens` of the runs of equal rows."""
    starts = 1 + (names[1:] != names[:-1]).any(-1).nonzero().squeeze(1)
    return torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), len(names))))


def _mask_with_cache(parts: MaskParts, is_key: Tensor, first_query: int, q_length: int) -> AttentionMask:
    """The queries are the last of the keys."""
    _check_runs(parts, is_key)
    is_query = _columns(is_key, first_query, q_length)
    return AttentionMask(
        parts.causal,
        parts.window,
        cu_seqlens_q=_ends(is_query.sum(1)),
        cu_seqlens_k=_ends(is_key.sum(1)),
        query_index=is_query.flatten().nonzero().squeeze(1),
        key_index=is_key.flatten().nonzero().squeeze(1),
    )


def _ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _check_runs(parts: MaskParts, is_token: Tensor) -> None:
    """Leaving out padding keeps the order of tokens, which is all that a causal mask asks, but not their distances."""
    runs = is_token.long().diff(dim=1, prepend=is_token.new_zeros(len(is_token), 1).long()).eq(1).sum(1)
    if (parts.window is not None or parts.chunk_size is not None) and (runs > 1).any():
        raise ValueError("attention_mask has padding between tokens, which a sliding window or chunks cannot honour")
