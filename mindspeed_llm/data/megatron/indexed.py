"""Megatron's indexed data sets: ``PREFIX.bin`` has the tokens of all documents, ``PREFIX.idx`` says where each begins.

Layout of ``.idx``, little-endian, without padding::

    magic    9 bytes              b"MMIDIDX\\0\\0"
    version  uint64               1
    type     uint8                of the tokens in .bin: 4 = int32, 8 = uint16
    n, d     uint64, uint64       numbers of sequences and of document bounds
    lengths  int32 [n]            tokens of each sequence
    offsets  int64 [n]            where it begins in .bin, in bytes
    bounds   int64 [d]            not read: every sequence is a document, as in Megatron's GPT data sets
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from mindspeed_llm.errors import DataError

MAGIC = b"MMIDIDX\0\0"
TOKEN_TYPES: dict[int, type[np.integer]] = {4: np.int32, 8: np.uint16}
"""NumPy type of the tokens by its number in the index."""
HEADER = struct.Struct("<9sQBQQ")


def index_path(prefix: str | Path) -> Path:
    """The index that belongs to ``prefix``."""
    return Path(f"{prefix}.idx")


class IndexedTokens:
    """The documents of ``prefix.bin``, memory-mapped. Raises ``DataError`` if the files cannot be what they claim."""

    def __init__(self, prefix: str | Path) -> None:
        index, data = index_path(prefix), Path(f"{prefix}.bin")
        for path in (index, data):
            if not path.is_file():
                raise DataError(f"there is no {path}: an indexed data set is a pair of a .bin and an .idx file")
        dtype, count, bounds = _read_header(index)
        expected = HEADER.size + 12 * count + 8 * bounds
        if index.stat().st_size < expected:
            raise DataError(
                f"{index} is cut off: {index.stat().st_size} bytes, {expected} for its {count} documents; copy it again"
            )
        self.lengths: np.ndarray = np.memmap(index, "<i4", "r", HEADER.size, (count,)) if count else np.zeros(0, "<i4")
        offsets = np.memmap(index, "<i8", "r", HEADER.size + 4 * count, (count,)) if count else np.zeros(0, "<i8")
        stat = index.stat()
        self.name = Path(prefix).name
        self.identity = (str(index.resolve()), stat.st_size, stat.st_mtime_ns)
        """Of the index file, as long as nobody writes it anew."""
        size = np.dtype(dtype).itemsize
        if self.lengths.min(initial=0) < 0 or offsets.min(initial=0) < 0 or (offsets % size).any():
            raise DataError(f"{index} is broken: it has a document of negative length or at no token's place")
        needed = int((offsets + self.lengths.astype(np.int64) * size).max(initial=0))
        if data.stat().st_size < needed:
            raise DataError(f"{data} is cut off: {data.stat().st_size} bytes, {index.name} asks for {needed}")
        self._starts = offsets // size
        self._tokens = np.memmap(data, np.dtype(dtype).newbyteorder("<"), "r") if needed else np.zeros(0, dtype)

    def __len__(self) -> int:
        """Documents."""
        return len(self.lengths)

    def count(self, documents: range) -> int:
        """Tokens of some documents in a row."""
        return int(self.lengths[documents.start : documents.stop].sum(dtype=np.int64))

    def read(self, document: int, offset: int = 0, limit: int | None = None) -> np.ndarray:
        """The tokens of a document from ``offset`` on, at most ``limit`` of them."""
        left = int(self.lengths[document]) - offset
        start = int(self._starts[document]) + offset
        return self._tokens[start : start + (left if limit is None else min(left, limit))]


def _read_header(path: Path) -> tuple[type[np.integer], int, int]:
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is no index of Megatron: it begins with {header[: len(MAGIC)]!r}, not {MAGIC!r}")
    if len(header) < HEADER.size:
        raise DataError(f"{path} is cut off within its header of {HEADER.size} bytes; copy it again")
    _, version, code, count, bounds = HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{path} has version {version}; only version 1 is known")
    if code not in TOKEN_TYPES:
        names = " and ".join(f"{number} ({dtype.__name__})" for number, dtype in TOKEN_TYPES.items())
        raise DataError(f"{path} has tokens of type {code}; known are {names}")
    return TOKEN_TYPES[code], count, bounds
