"""Samples of an indexed data set as rows to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.data.megatron.indices import SampleOrder
from mindspeed_llm.data.report import Report
from mindspeed_llm.data.store import Row


@dataclass(frozen=True)
class OneText:
    """Megatron's form of a sample: one text, in which documents see each other and are known by their end token."""

    eod: int
    """The token at the end of a document."""
    reset_position_ids: bool = False
    """Positions begin again behind it."""
    eod_mask_loss: bool = False
    """It has no target."""

    def row(self, tokens: np.ndarray) -> Row:
        """The row of the tokens of a sample, the last target included."""
        labels = tokens.astype(np.int32)
        input_ids = labels[:-1].copy()
        ends = np.flatnonzero(input_ids == self.eod)
        if self.eod_mask_loss:
            labels[ends + 1] = IGNORE_INDEX
        bounds = np.unique([*(ends + 1), len(input_ids)]) if self.reset_position_ids else [len(input_ids)]
        return Row(input_ids=input_ids, labels=labels, lengths=np.diff(bounds, prepend=0))


class GptDataset(Dataset[Row]):
    """The samples of ``order``: ``sequence_length`` tokens, and labels that have one more, the last target.

    The pieces of documents in a sample are apart: positions restart, and no token predicts the first of the next one.
    With ``form`` a sample is one text instead.
    """

    def __init__(self, tokens: IndexedTokens, order: SampleOrder, form: OneText | None = None) -> None:
        self.tokens = tokens
        self.order = order
        self.form = form

    @property
    def epochs(self) -> int:
        """Passes over the documents that one pass over the samples makes."""
        return self.order.epochs

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of every row, int64 [rows]."""
        return np.full(len(self), self.order.sequence_length)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pieces = self._pieces(int(self.order.shuffle_index[index]))
        if self.form:
            return self.form.row(np.concatenate(pieces))
        labels = np.concatenate(pieces).astype(np.int32)
        input_ids = labels[:-1].copy()
        lengths = np.array([len(piece) for piece in pieces])
        labels[np.cumsum(lengths)[:-1]] = IGNORE_INDEX
        lengths[-1] -= 1  # the last target is no input
        return Row(input_ids=input_ids, labels=labels, lengths=lengths[lengths > 0])

    def _pieces(self, sample: int) -> list[np.ndarray]:
        """What each document has of a sample and the token behind it."""
        position, offset = map(int, self.order.locate(sample))
        pieces: list[np.ndarray] = []
        missing = self.order.sequence_length + 1
        while missing:
            piece = self.tokens.read(int(self.order.document_index[position]), offset, missing)
            if len(piece):
                pieces.append(piece)
            missing -= len(piece)
            position, offset = position + 1, 0
        return pieces

    def num_targets(self, count: int) -> int:
        """Targets of the first ``count`` samples where documents are apart, counted without reading a token."""
        length = self.order.sequence_length
        first_tokens = np.unique(self.order.starts[(self.order.starts > 0)])  # of documents; none is a target
        left_out = np.bincount((first_tokens - 1) // length, minlength=len(self) + 1)
        return count * length - int(left_out[self.order.shuffle_index[:count]].sum())

    def report(self, name: str, count: int | None = None) -> Report:
        """What there is to train on in the first ``count`` samples."""
        count = len(self) if count is None else count
        documents, tokens = len(self.order.document_index), count * self.order.sequence_length
        return Report(
            name,
            rows_read=documents // self.order.epochs,
            rows=count,
            documents=documents,
            tokens=tokens,
            targets=tokens if self.form else self.num_targets(count),
        )


class BlendedDataset(Dataset[Row]):
    """Samples of several data sets: the ``i``-th is number ``sample_index[i]`` of ``datasets[dataset_index[i]]``."""

    epochs = 1

    def __init__(self, datasets: Sequence[GptDataset], dataset_index: np.ndarray, sample_index: np.ndarray) -> None:
        self.datasets = datasets
        self.dataset_index = dataset_index
        self.sample_index = sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of every row, int64 [rows]."""
        return np.full(len(self), self.datasets[0].order.sequence_length)

    def __getitem__(self, index: int) -> Row:
        return self.datasets[self.dataset_index[index]][int(self.sample_index[index])]

    def report(self, name: str) -> Report:
        """What there is to train on, of all data sets together."""
        counts = np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()
        parts = [one.report(name, count) for one, count in zip(self.datasets, counts, strict=True)]
        return Report(
            name,
            **{
                key: sum(getattr(part, key) for part in parts)
                for key in ("rows_read", "rows", "documents", "tokens", "targets")
            },
        )
