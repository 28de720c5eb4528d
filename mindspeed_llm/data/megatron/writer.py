"""Writes indexed data sets byte for byte as Megatron's ``IndexedDatasetBuilder``, and goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mindspeed_llm.data.megatron.indexed import HEADER, MAGIC, TOKEN_TYPES, index_path

_LARGEST_UINT16_VOCABULARY = 65499  # Megatron's limit


def token_type(vocabulary: int) -> type[np.integer]:
    """The type that Megatron stores the tokens of a vocabulary of this size in."""
    return np.uint16 if vocabulary <= _LARGEST_UINT16_VOCABULARY else np.int32


class IndexedWriter:
    """Appends documents to ``prefix.bin`` and writes ``prefix.idx`` at the end.

    Until then everything is in files of other names, and ``prefix.progress.json`` says how much of them was written for
    good. A writer of the same ``identity`` goes on from there: ``chunks`` tells how many ``write``s are done.
    """

    def __init__(self, prefix: Path, dtype: type[np.integer], identity: str) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.chunks = 0
        self._identity = identity
        self._progress = Path(f"{prefix}.progress.json")
        prefix.parent.mkdir(parents=True, exist_ok=True)
        sizes = self._read_progress()
        self._files = [self._open(name, size) for name, size in zip(("bin", "lengths", "bounds"), sizes, strict=True)]

    def write(self, tokens: np.ndarray, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        """Append documents: ``sizes`` tells for each how many of ``lengths`` it has, 1 or, if it is empty, 0."""
        previous = self._files[1].tell() // 4  # sequences
        parts = (
            tokens.astype(self.dtype),
            np.asarray(lengths, "<i4"),
            (previous + np.cumsum(sizes)).astype("<i8"),
        )
        for file, part in zip(self._files, parts, strict=True):
            file.write(part.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.chunks += 1
        state = {"identity": self._identity, "chunks": self.chunks, "sizes": [file.tell() for file in self._files]}
        _replace(self._progress, json.dumps(state).encode())

    def finish(self) -> None:
        """Give the data set its name; the index, which makes it one, last."""
        for file in self._files:
            file.close()
        data, lengths_path, bounds_path = (self._partial(name) for name in ("bin", "lengths", "bounds"))
        lengths = np.fromfile(lengths_path, "<i4")
        bounds = np.fromfile(bounds_path, "<i8")
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        code = next(code for code, dtype in TOKEN_TYPES.items() if np.dtype(dtype) == self.dtype)
        header = HEADER.pack(MAGIC, 1, code, len(lengths), len(bounds) + 1)
        offsets = (ends - lengths * np.int64(self.dtype.itemsize)).astype("<i8")
        index = [header, lengths.tobytes(), offsets.tobytes(), np.zeros(1, "<i8").tobytes(), bounds.tobytes()]
        index_path(self.prefix).unlink(missing_ok=True)  # of an earlier data set of this name
        os.replace(data, f"{self.prefix}.bin")
        _replace(index_path(self.prefix), b"".join(index))
        for path in (lengths_path, bounds_path, self._progress):
            path.unlink()

    def _partial(self, name: str) -> Path:
        return Path(f"{self.prefix}.{name}.partial")

    def _read_progress(self) -> list[int]:
        """Bytes of each file that count; none if they are of another data set."""
        try:
            state = json.loads(self._progress.read_text())
            is_ours = state["identity"] == self._identity
            paths = (self._partial(name) for name in ("bin", "lengths", "bounds"))
            is_whole = all(path.stat().st_size >= size for path, size in zip(paths, state["sizes"], strict=True))
        except (OSError, ValueError, KeyError, TypeError):
            return [0, 0, 0]
        if not (is_ours and is_whole):
            return [0, 0, 0]
        self.chunks = state["chunks"]
        return state["sizes"]

    def _open(self, name: str, size: int) -> BinaryIO:
        path = self._partial(name)
        path.touch()
        os.truncate(path, size)
        return path.open("ab")


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = Path(f"{path}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
