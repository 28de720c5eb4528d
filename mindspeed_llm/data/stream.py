"""Rows straight from their files, in order and without end, from any place that was written down.

Nothing is indexed or held: lines are read one after the other, and of a parquet file one row group at a time. A row is
only parsed by the rank that trains on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.data.mixing import MixStrategy, draw_blocks
from mindspeed_llm.data.prepare import Item
from mindspeed_llm.data.sources import (
    BOM,
    Row,
    data_files,
    is_json_array,
    open_source,
    parse_json_line,
    parse_text_line,
    readable,
    table_row,
)
from mindspeed_llm.data.specs import DatasetSpec
from mindspeed_llm.errors import DataError


class RawRow(NamedTuple):
    """A row that was not parsed yet."""

    spec: DatasetSpec
    where: str
    load: Callable[[], Row]

    def item(self) -> Item:
        """The row, or why there is none."""
        try:
            return Item(self.spec, self.where, self.load())
        except RowError as error:
            return Item(self.spec, self.where, error)


class Place(NamedTuple):
    """Where the next row of a data set begins."""

    file: int = 0
    offset: int = 0
    """In bytes, of text files."""
    row: int = 0
    """Rows before it in the file; of text files lines, the blank ones too."""


class RawStream:
    """The raw rows of several data sets, mixed as ``mixed_order`` mixes them, pass after pass.

    ``position`` is a JSON value; a stream that is given it goes on from there.
    """

    def __init__(
        self,
        specs: Sequence[DatasetSpec],
        mix_strategy: MixStrategy,
        interleave_probs: Sequence[float] | None,
        seed: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        self.passes = 0  # completed since this object was made
        self._specs, self._strategy, self._probs, self._seed = specs, mix_strategy, interleave_probs, seed
        self._start(**(position or {}))

    def _start(self, places: Sequence[Sequence[int]] = (), ended: Sequence[bool] = (), taken: int = 0) -> None:
        starts = [Place(*place) for place in places] or [Place()] * len(self._specs)
        self._data_sets = [_DatasetRows(spec, place) for spec, place in zip(self._specs, starts, strict=True)]
        self._ended = list(ended) or [False] * len(self._specs)  # came to their end in this pass
        self._taken = taken  # rows of this pass
        self._sources = self._order()

    @property
    def position(self) -> dict[str, Any]:
        places = [list(data_set.place) for data_set in self._data_sets]
        return {"places": places, "ended": list(self._ended), "taken": self._taken}

    def block(self, size: int) -> list[RawRow]:
        """The next rows, ``size`` of them unless the pass ends before."""
        rows: list[RawRow] = []
        while len(rows) < size:
            source = next(self._sources)
            row, is_last = self._data_sets[source].take()
            rows.append(row)
            self._taken += 1
            self._ended[source] |= is_last
            if self._is_over():
                self.passes += 1
                self._start()
                break
        return rows

    def _is_over(self) -> bool:
        """Whether the pass is. Data sets that take turns finish the round."""
        is_in_turn = self._strategy != "concat" and self._probs is None
        if is_in_turn and self._taken % len(self._specs):
            return False
        return any(self._ended) if self._strategy == "interleave_under" else all(self._ended)

    def _order(self) -> Iterator[int]:
        """The data set of every row that is left of the pass."""
        if self._strategy == "concat" or len(self._specs) == 1:
            while True:
                yield self._ended.index(False)
        if self._probs is None:
            yield from (taken % len(self._specs) for taken in count(self._taken))
        else:
            blocks = draw_blocks(self._probs, self._seed)
            draws = (int(source) for block in blocks for source in block)
            yield from islice(draws, self._taken, None)


class _DatasetRows:
    """The rows of one data set, again and again, from ``place`` on."""

    def __init__(self, spec: DatasetSpec, place: Place) -> None:
        self.spec = spec
        self.place = place
        self._files = data_files(spec.path)
        self._rows = self._read()
        self._next = next(self._rows, None)
        if self._next is None:
            raise DataError(f"data set {spec.name!r} has no rows: {spec.path}")

    def take(self) -> tuple[RawRow, bool]:
        """The next row, and whether it is the last one before the data set begins again."""
        assert self._next is not None
        row, self.place = self._next
        self._next = next(self._rows, None)
        if self._next is not None:
            return row, False
        self.place = Place()
        self._rows = self._read()
        self._next = next(self._rows, None)
        return row, True

    def _read(self) -> Iterator[tuple[RawRow, Place]]:
        """Rows from ``place`` to the end, each with the place behind it."""
        start = self.place
        for number, file in enumerate(self._files):
            if number >= start.file:
                begin = start if number == start.file else Place(number)
                for where, load, offset, row in _read_file(file, begin.offset, begin.row):
                    yield RawRow(self.spec, where, load), Place(number, offset, row)


_FileRow = tuple[str, Callable[[], Row], int, int]  # where it is, how to parse it, offset and row behind it


def _read_file(file: Path, offset: int, row: int) -> Iterator[_FileRow]:
    if file.suffix == ".txt":
        return _read_lines(file, parse_text_line, offset, row)
    if file.suffix == ".jsonl" or (file.suffix == ".json" and not is_json_array(file)):
        return _read_lines(file, parse_json_line, offset, row)
    return _read_parquet(file, row) if file.suffix == ".parquet" else _read_source(file, row)


def _read_lines(file: Path, parse: Callable[[bytes, int], Row], offset: int, row: int) -> Iterator[_FileRow]:
    with file.open("rb") as lines:
        if not offset and lines.read(len(BOM)) == BOM:
            offset = len(BOM)
        lines.seek(offset)
        for line in lines:
            start, offset, row = offset, offset + len(line), row + 1
            if not line.isspace():
                yield f"{file}:{row}", partial(parse, line, start), offset, row


def _read_parquet(file: Path, first: int) -> Iterator[_FileRow]:
    with readable(file, "a parquet"):
        parquet = pq.ParquetFile(file, memory_map=True)
    end = 0
    for group in range(parquet.num_row_groups):
        begin, end = end, end + parquet.metadata.row_group(group).num_rows
        if first < end:
            with readable(file, "a parquet"):
                table = parquet.read_row_group(group)
            for row in range(max(first, begin), end):
                record = table.slice(row - begin, 1)
                yield f"{file}: row {row + 1}", partial(table_row, record), 0, row + 1


def _read_source(file: Path, first: int) -> Iterator[_FileRow]:
    source = open_source(file)
    for index in range(first, len(source)):
        yield source.where(index), partial(source.__getitem__, index), 0, index + 1
