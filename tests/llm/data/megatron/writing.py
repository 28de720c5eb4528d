"""Indexed data sets for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> Path:
    """Write ``documents`` as ``prefix.bin`` and ``prefix.idx``; returns ``prefix``."""
    code, size = {"uint16": (8, 2), "int32": (4, 4)}[dtype]
    lengths = [len(document) for document in documents]
    ends = np.cumsum([0, *lengths])
    np.concatenate([np.asarray(document, dtype) for document in documents]).tofile(f"{prefix}.bin")
    index = [
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(documents), len(documents) + 1),
        np.array(lengths, "<i4").tobytes(),
        (ends[:-1] * size).astype("<i8").tobytes(),
        np.arange(len(documents) + 1, dtype="<i8").tobytes(),
    ]
    Path(f"{prefix}.idx").write_bytes(b"".join(index))
    return prefix
