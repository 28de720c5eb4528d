"""What each rank of a context-parallel group gets of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_llm.batch import token_mask
from mindspeed_llm.data.collate import Batch
from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.parallel.context.layout import SequenceLayout, find_documents


@dataclass(frozen=True)
class ContextSharder:
    """Cuts rows along the sequence: balanced chunks over the ring, each rank's two chunks in a row over Ulysses' ranks.

    8 tokens on a ring of 2 x 2 Ulysses ranks::

        token           0  1  2  3  4  5  6  7
        ring rank       0  0  1  1  1  1  0  0
        Ulysses rank    0  0  0  0  1  1  1  1

    Without context parallelism it is a group of one rank, which gets everything as it is.
    """

    ring_size: int = 1
    ulysses_size: int = 1
    ring_rank: int = 0
    ulysses_rank: int = 0

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> ContextSharder:
        """The sharder of this rank's place in a mesh ``(batch, ring, ulysses)``; None: no context parallelism."""
        if mesh is None:
            return WHOLE
        ring, ulysses = mesh["ring"], mesh["ulysses"]
        return cls(ring.size(), ulysses.size(), ring.get_local_rank(), ulysses.get_local_rank())

    @property
    def num_ranks(self) -> int:
        """Ranks that hold parts of the same rows."""
        return self.ring_size * self.ulysses_size

    @property
    def multiple(self) -> int:
        """Rows are padded to a multiple of this: every rank gets two chunks of one size."""
        return 2 * self.num_ranks

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch, ``[batch, padded seq / num_ranks]``.

        Position ids stay those of the whole documents. Documents are found before anything is cut, and kept in
        ``layout`` for the attention: padding is one of its own, which nobody else sees. ``attention_mask`` is there for
        whoever counts tokens, where there is padding; the model does not get it.
        """
        if self.num_ranks == 1:
            return batch
        missing = -batch["input_ids"].shape[1] % self.multiple
        mask = token_mask(batch)
        position_ids = torch.cat([batch["position_ids"], _positions(batch, missing)], dim=1)
        is_token = torch.ones_like(batch["input_ids"]) if mask is None else mask
        padded_mask = _pad(is_token, missing, 0)
        cu_seqlens = find_documents(position_ids, padded_mask if "attention_mask" in batch else None)
        seq = position_ids.shape[1]
        indices = self.local_token_global_indices(seq)
        part = Batch(
            input_ids=_pad(batch["input_ids"], missing, 0)[:, indices],
            labels=_pad(batch["labels"], missing, IGNORE_INDEX)[:, indices],
            position_ids=position_ids[:, indices],
        )
        if not padded_mask.all():
            part["attention_mask"] = padded_mask[:, indices]
        held = torch.stack(self._indices_of_all(seq))
        counted = padded_mask[:, held].transpose(0, 1).bool()
        part.layout = SequenceLayout(cu_seqlens, seq, self.ring_size, counted, held, int(batch["position_ids"].max()))
        return part

    def local_token_global_indices(self, seq: int) -> Tensor:
        """int64 ``[seq / num_ranks]``: which tokens of a row of ``seq`` tokens this rank holds, in its own order.

        Raises ValueError when ``seq`` is not a multiple of ``multiple``.
        """
        return self._indices(seq, self.ring_rank, self.ulysses_rank)

    def _indices(self, seq: int, ring_rank: int, ulysses_rank: int) -> Tensor:
        if seq % self.multiple:
            raise ValueError(
                f"{seq} tokens cannot be cut for {self.num_ranks} ranks: pad to a multiple of {self.multiple}"
            )
        chunks = torch.arange(seq).view(2 * self.ring_size, -1)
        held = torch.cat([chunks[ring_rank], chunks[2 * self.ring_size - 1 - ring_rank]])
        return held.view(self.ulysses_size, -1)[ulysses_rank]

    def _indices_of_all(self, seq: int) -> list[Tensor]:
        return [self._indices(seq, r, u) for r in range(self.ring_size) for u in range(self.ulysses_size)]


WHOLE = ContextSharder()
"""Without context parallelism."""


def _pad(tensor: Tensor, missing: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, missing), value=value)


def _positions(batch: Batch, missing: int) -> Tensor:
    """Positions of a document of padding behind every row."""
    return torch.arange(missing).expand(len(batch["input_ids"]), -1)
