"""Rows to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.data.store import Row

if TYPE_CHECKING:
    from mindspeed_llm.parallel.context.layout import SequenceLayout


class Batch(dict[str, torch.Tensor]):
    """One micro-batch, int64 tensors on the CPU, ready for ``model(**batch)`` once ``labels`` is taken out.

    * ``input_ids [b, s]``, padded on the right
    * ``labels [b, s]``: the *target* of each position (already shifted), -100 where there is none
    * ``position_ids [b, s]``: from 0 in every document; padding behind a packed row is a document of its own
    * ``attention_mask [b, s]``, only where rows are padded and none is packed: without it transformers derives from
      ``position_ids`` which positions belong to the same document
    """

    token_mask: torch.Tensor | None = None
    """``[b, s]``, 0 for the padding behind packed rows: what ``attention_mask``, which is not there, would say of it.
    None: there is an ``attention_mask``, or nothing is padding."""
    num_tokens: int = 0
    """Tokens, padding not counted."""
    num_unshifted_labels: int = 0
    """Labels before the shift, which LLaMA-Factory divides the loss by: the first label of a row is never a target."""
    layout: SequenceLayout | None = None
    """Where the documents lay before context parallelism cut the rows; None: the rows are whole."""


@dataclass(frozen=True)
class Quirks:
    """How LLaMA-Factory lays out packed rows, for runs that must reproduce its numbers."""

    row_length: int
    """Every row is padded to this length, and padding has position 0."""
    leak: bool
    """Documents of a row attend to each other (its plain ``packing``)."""


@dataclass(frozen=True)
class Collator:
    """Puts rows into one batch, padded to the longest and up to a multiple of ``pad_to_multiple``."""

    pad_token_id: int
    pad_to_multiple: int = 8
    quirks: Quirks | None = None

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """The batch of ``rows``; of no rows a batch without targets, for a rank that has none when others do."""
        longest = max((len(row["input_ids"]) for row in rows), default=1)
        if self.quirks:
            longest = max(longest, self.quirks.row_length)
        width = -(-longest // self.pad_to_multiple) * self.pad_to_multiple
        shape = (max(len(rows), 1), width)
        input_ids = np.full(shape, self.pad_token_id, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        position_ids = np.tile(np.arange(width), (shape[0], 1))
        attention_mask = np.zeros(shape, np.int64)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            input_ids[index, :length] = row["input_ids"]
            labels[index, :length] = self._targets(row)
            position_ids[index] = self._positions(row, width)
            attention_mask[index, :length] = 1
        batch = Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position_ids),
        )
        is_packed = self.quirks is not None or any(len(row["lengths"]) > 1 for row in rows)
        if self.quirks and self.quirks.leak:
            batch["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        elif not attention_mask.all() and not self.quirks:
            if rows and not is_packed:
                batch["attention_mask"] = torch.from_numpy(attention_mask)
            else:
                batch.token_mask = torch.from_numpy(attention_mask)
        batch.num_tokens = int(attention_mask.sum())
        batch.num_unshifted_labels = sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in rows)
        return batch

    def _targets(self, row: Row) -> np.ndarray:
        """Labels shifted by one; the last position of a document has no target, that of a row the label behind it."""
        targets = np.append(row["labels"][1:], IGNORE_INDEX)[: len(row["input_ids"])]
        if not self.quirks:
            targets[np.cumsum(row["lengths"])[:-1] - 1] = IGNORE_INDEX
        return targets

    def _positions(self, row: Row, width: int) -> np.ndarray:
        """Positions from 0 in each document and, behind several documents, in the padding."""
        length = len(row["input_ids"])
        if len(row["lengths"]) == 1 and not self.quirks:
            return np.arange(width)
        starts = np.repeat(np.cumsum(row["lengths"]) - row["lengths"], row["lengths"])
        padding = np.zeros(width - length, np.int64) if self.quirks else np.arange(width - length)
        return np.concatenate([np.arange(length) - starts, padding])


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token to pad with. Any will do, as padding is known by place and not by token: an eos is still learnt."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
