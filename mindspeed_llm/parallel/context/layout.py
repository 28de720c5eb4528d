"""Where the documents of a micro-batch lie, and which part of them chunks and neighbouring tokens have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The arguments with which ``flash_attention`` attends from one chunk's queries to another chunk's keys."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    query_offsets: Tensor


@dataclass(frozen=True)
class Halo:
    """What a causal convolution over a rank's tokens needs of the tokens before them.

    A rank's tokens of a row are two halves, each contiguous. The last ``reach`` tokens of every half, or all where it
    has fewer, are given to all ranks.
    """

    index: Tensor
    """int64 ``[2, reach]``: where among the tokens given away, ``[ranks * 2 * given]``, those before each half are."""
    visible: Tensor
    """bool ``[batch, 2, reach]``: those that belong to the document that goes on in the half."""
    cu_seqlens: Tensor
    """int64: where sequences start in the flattened ``[batch, 2, reach + half]`` tokens, and the last one ends."""


@dataclass(frozen=True)
class SequenceLayout:
    """The documents of a micro-batch ``[batch, seq]`` before it was cut, the same on every rank of the group.

    Along a ring of R ranks a row is cut into 2R chunks, of which rank r holds chunks r and 2R - 1 - r. A causal query
    in chunk i sees i chunks, so every rank has the same amount of work (R = 2)::

        chunk    0       1       2       3
        rank     0       1       1       0
        sees     x       xx      xxx     xxxx       rank 0: 1 + 4, rank 1: 2 + 3
    """

    cu_seqlens: Tensor
    """int64 ``[documents + 1]`` on the host: where each document starts in the flattened ``[batch * seq]`` tokens, and
    where the last one ends. None crosses the end of a row; padding is a document too."""
    seq: int
    """Tokens of a row, a multiple of the number of chunks."""
    ring_size: int
    counted: Tensor
    """bool ``[ranks, batch, seq / ranks]`` on the host: tokens that are not padding, of every rank of the group."""
    held: Tensor
    """int64 ``[ranks, seq / ranks]`` on the host: which tokens of a row each rank of the group has."""
    last_position: int
    """The largest position in any document."""
    _blocks: dict[tuple[int, int, int | None], Block | None] = field(default_factory=dict, repr=False)
    _halos: dict[tuple[int, int], Halo] = field(default_factory=dict, repr=False)

    @property
    def chunk(self) -> int:
        """Tokens of a row in one chunk."""
        return self.seq // (2 * self.ring_size)

    def chunks_of(self, ring_rank: int) -> tuple[int, int]:
        """The two chunks of every row that a rank of the ring holds, in this order."""
        return ring_rank, 2 * self.ring_size - 1 - ring_rank

    def block(self, query_chunk: int, key_chunk: int, window: int | None) -> Block | None:
        """How the queries of one chunk see the keys of another, each ``[batch * chunk]`` tokens; None if none does."""
        key = (query_chunk, key_chunk, window)
        if key not in self._blocks:
            self._blocks[key] = self._find_block(*key)
        return self._blocks[key]

    def _find_block(self, query_chunk: int, key_chunk: int, window: int | None) -> Block | None:
        starts = self.cu_seqlens[:-1] % self.seq
        ends = starts + self.cu_seqlens.diff()

        def cut(chunk: int) -> tuple[Tensor, Tensor]:
            """Where in its row the part of each document within the chunk starts and ends."""
            first, last = chunk * self.chunk, (chunk + 1) * self.chunk
            return starts.clamp(first, last), ends.clamp(first, last)

        (q_start, q_end), (k_start, k_end) = cut(query_chunk), cut(key_chunk)
        visible = (q_start < q_end) & (k_start < k_end) & (k_start < q_end)
        if window is not None:
            visible &= q_start - (k_end - 1) < window
        if not visible.any():
            return None
        present = (q_start < q_end) | (k_start < k_end)
        return Block(
            _cumulative((q_end - q_start)[present]),
            _cumulative((k_end - k_start)[present]),
            (q_start - k_start)[present],
        )

    def halo(self, rank: int, reach: int) -> Halo:
        """What rank ``rank`` of the group must know of the ``reach`` tokens before each half of its own."""
        key = (rank, reach)
        if key not in self._halos:
            self._halos[key] = self._find_halo(*key)
        return self._halos[key]

    def _find_halo(self, rank: int, reach: int) -> Halo:
        halves = self.held.unflatten(1, (2, -1))  # [ranks, 2, half]
        half = halves.shape[2]
        given = halves[:, :, half - min(reach, half) :].flatten()
        first = halves[rank, :, 0]
        before = first[:, None] + torch.arange(-reach, 0)  # [2, reach]
        place = torch.zeros(self.seq, dtype=torch.int64)
        place[given] = torch.arange(len(given))
        index = place[before.clamp(min=0)]  # before a row there is none, and none is visible

        row = torch.arange(0, int(self.cu_seqlens[-1]), self.seq)  # where the rows start in the flattened tokens
        position = row[:, None] + first  # [batch, 2]
        document = self.cu_seqlens[torch.searchsorted(self.cu_seqlens, position, right=True) - 1]
        visible = row[:, None, None] + before >= document[:, :, None]

        starts = torch.zeros(len(row), self.seq, dtype=torch.bool)
        starts.view(-1)[self.cu_seqlens[:-1]] = True
        extended = torch.nn.functional.pad(starts[:, halves[rank]], (reach, 0))  # [batch, 2, reach + half]
        extended[:, :, 0] = True
        cu_seqlens = torch.cat([extended.flatten().nonzero().flatten(), torch.tensor([extended.numel()])])
        return Halo(index, visible, cu_seqlens)


def find_documents(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Where documents start in the flattened tokens ``[batch * seq]``, and the last one ends, as transformers sees it.

    Without an attention mask a document starts wherever positions do not go up by one. With one, a row is a single
    document; its padding, which nobody sees, is made another.
    """
    starts = position_ids.diff(dim=1) != 1 if attention_mask is None else attention_mask.diff(dim=1) != 0
    starts = torch.nn.functional.pad(starts, (1, 0), value=True)  # every row starts one
    end = torch.tensor([starts.numel()])
    return torch.cat([starts.flatten().nonzero().flatten(), end])


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
