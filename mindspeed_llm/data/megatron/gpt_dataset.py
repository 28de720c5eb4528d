"""Samples of an indexed data set as rows to train on."""

from __future__ import annotations

import numpy as np
from torch.utils.data import Dataset

from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.data.megatron.indices import SampleOrder
from mindspeed_llm.data.report import Report
from mindspeed_llm.data.store import Row


class GptDataset(Dataset[Row]):
    """The samples of ``order``: ``sequence_length`` tokens, and labels that have one more, the last target.

    The pieces of documents in a sample are apart: positions restart, and no token predicts the first of the next one.
    With ``leak`` a sample is one text, as in Megatron by default.
    """

    def __init__(self, tokens: IndexedTokens, order: SampleOrder, *, leak: bool = False) -> None:
        self.tokens = tokens
        self.order = order
        self.leak = leak

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
        labels = np.concatenate(pieces).astype(np.int32)
        input_ids = labels[:-1].copy()
        lengths = np.array([len(piece) for piece in pieces])
        if self.leak:
            return Row(input_ids=input_ids, labels=labels, lengths=np.array([len(input_ids)]))
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

    def report(self, name: str) -> Report:
        """What there is to train on, counted without reading a token."""
        starts, targets = self.order.starts, self.order.num_tokens
        if not self.leak:  # every token of the stream is a target once, but for the first of each document
            targets -= np.unique(starts[(starts > 0) & (starts <= targets)]).size
        documents = len(self.order.document_index)
        return Report(
            name,
            rows_read=documents // self.order.epochs,
            rows=len(self),
            documents=documents,
            tokens=self.order.num_tokens,
            targets=targets,
        )
