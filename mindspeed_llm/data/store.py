"""Prepared rows on disk: flat, memory-mapped arrays that the processes of a machine share.

A folder holds ``input_ids.bin`` and, unless every token is trained on, ``labels.bin`` (int32, all documents one after
the other), ``documents.npy`` (where each document ends, in tokens) and ``rows.npy`` (where each row ends, in
documents): an unpacked row is one document, a packed row several.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from torch.utils.data import Dataset

from mindspeed_llm.data.encode import IGNORE_INDEX


class Row(TypedDict):
    """One row of a data set. Labels are not shifted; -100 marks what is not trained on.

    ``labels`` may have one token more than ``input_ids``: the target of the last position.
    """

    input_ids: np.ndarray  # [tokens] int32
    labels: np.ndarray  # [tokens] or [tokens + 1] int32
    lengths: np.ndarray  # [documents] int64: tokens of each document in the row


class TokenRows(Dataset[Row]):
    """The rows in a folder written by ``RowWriter``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._input_ids = _map(folder / "input_ids.bin")
        self._labels = _map(folder / "labels.bin") if (folder / "labels.bin").exists() else self._input_ids
        self._document_ends = np.load(folder / "documents.npy", mmap_mode="r")
        self._row_ends = np.load(folder / "rows.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._row_ends)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = int(self._row_ends[index - 1]) if index else 0
        ends = self._document_ends[first : int(self._row_ends[index])]
        start = int(self._document_ends[first - 1]) if first else 0
        tokens = slice(start, int(ends[-1]))
        return Row(
            input_ids=self._input_ids[tokens],
            labels=self._labels[tokens],
            lengths=np.diff(ends, prepend=start),
        )

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of every row, int64 [rows]."""
        document_ends = np.concatenate([[0], self._document_ends]).astype(np.int64)
        return np.diff(document_ends[self._row_ends], prepend=0)

    @property
    def largest_token(self) -> int:
        return int(self._input_ids.max()) if len(self._input_ids) else 0

    @property
    def num_tokens(self) -> int:
        return len(self._input_ids)

    @property
    def num_targets(self) -> int:
        """Labels that are left after the shift; reads all of them."""
        if self._labels is self._input_ids:
            return self.num_tokens - self.num_documents
        starts = np.concatenate([[0], self._document_ends[:-1]]).astype(np.int64)[: self.num_documents]
        return int((self._labels != IGNORE_INDEX).sum() - (self._labels[starts] != IGNORE_INDEX).sum())

    @property
    def num_documents(self) -> int:
        return len(self._document_ends)


class RowWriter:
    """Writes rows to a folder as they come, so that memory does not grow with the data set."""

    def __init__(self, folder: Path, *, with_labels: bool) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._input_ids = (folder / "input_ids.bin").open("wb")
        self._labels = (folder / "labels.bin").open("wb") if with_labels else None
        self._lengths: list[int] = []
        self._row_sizes: list[int] = []

    def write(
        self, input_ids: np.ndarray, labels: np.ndarray | None, lengths: Sequence[int], row_sizes: Sequence[int]
    ) -> None:
        """Append documents of ``lengths`` tokens each, ``row_sizes`` of them to a row."""
        input_ids.astype(np.int32, copy=False).tofile(self._input_ids)
        if self._labels and labels is not None:
            labels.astype(np.int32, copy=False).tofile(self._labels)
        self._lengths += lengths
        self._row_sizes += row_sizes

    @property
    def lengths(self) -> list[int]:
        """Lengths of the documents written so far."""
        return self._lengths

    def regroup(self, rows: Sequence[Sequence[int]]) -> None:
        """Cut what was written into other rows: for each row the lengths of the documents in it."""
        self._lengths = [length for row in rows for length in row]
        self._row_sizes = [len(row) for row in rows]

    def close(self) -> TokenRows:
        self._input_ids.close()
        if self._labels:
            self._labels.close()
        np.save(self._folder / "documents.npy", np.cumsum(self._lengths, dtype=np.int64))
        np.save(self._folder / "rows.npy", np.cumsum(self._row_sizes, dtype=np.int64))
        return TokenRows(self._folder)


def _map(path: Path) -> np.ndarray:
    if path.stat().st_size == 0:  # cannot be mapped
        return np.zeros(0, np.int32)
    return np.memmap(path, np.int32, mode="r")
