"""Files of rows: json, jsonl, parquet, csv, arrow and txt, each row with the place it came from."""

from __future__ import annotations

import csv
import io
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.errors import DataError

Row = dict[str, Any]
BOM = b"\xef\xbb\xbf"


class Source(Protocol):
    """Rows of one file. ``source[i]`` raises ``RowError`` if the row is broken; ``where(i)`` names file and line."""

    path: Path

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    def where(self, index: int) -> str: ...


def parse_json_line(line: bytes, offset: int) -> Row:
    """The JSON object in a line that begins at ``offset`` of its file."""
    text = decode_line(line, offset)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise RowError(f"JSON that cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RowError(f"not a JSON object but {type(value).__name__}")
    return value


def parse_text_line(line: bytes, offset: int) -> Row:
    """A line as a document of its own."""
    return {"text": decode_line(line, offset)}


def decode_line(line: bytes, offset: int) -> str:
    """The text of a line without its end."""
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        place = offset + error.start
        raise RowError(f"byte 0x{line[error.start]:02x} at offset {place} of the file is not UTF-8") from None


class Lines:
    """A text file read line by line through a memory map; blank lines are no rows. Lines are parsed when asked for."""

    def __init__(self, path: Path, parse: Callable[[bytes, int], Row]) -> None:
        self._parse = parse
        self.path = path
        with path.open("rb") as file:
            is_empty = not file.read(1)
            self._bytes: mmap.mmap | bytes = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = len(BOM) if self._bytes[:3] == BOM else 0
        ends = self._line_ends()
        starts = np.concatenate([[start], ends[:-1] + 1]).astype(np.int64)
        has_text = ends > starts
        for line in np.flatnonzero(has_text & (ends - starts <= 8)):
            has_text[line] = not self._bytes[starts[line] : ends[line]].isspace()
        self._numbers = np.flatnonzero(has_text)  # of the lines that are rows, from 0
        self._starts, self._ends = starts[has_text], ends[has_text]

    def _line_ends(self) -> np.ndarray:
        """Offsets of the ends of all lines, int64."""
        view = np.frombuffer(self._bytes, np.uint8)
        step = 1 << 26  # bounds the memory of the comparison
        found = [np.flatnonzero(view[i : i + step] == ord("\n")) + i for i in range(0, len(view), step)]
        ends = np.concatenate(found) if found else np.zeros(0, np.int64)
        if len(view) and view[-1] != ord("\n"):
            ends = np.append(ends, len(view))
        return ends.astype(np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index] + 1}"

    def __getitem__(self, index: int) -> Row:
        start = int(self._starts[index])
        return self._parse(self._bytes[start : self._ends[index]], start)


class Rows:
    """Rows that are all in memory; ``lines`` are their line numbers, where the file has lines."""

    def __init__(self, path: Path, rows: Sequence[Any], lines: Sequence[int] | None = None) -> None:
        self.path, self._rows, self._lines = path, rows, lines

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise RowError(f"not a JSON object but {type(row).__name__}")
        return row

    def where(self, index: int) -> str:
        return f"{self.path}:{self._lines[index]}" if self._lines else f"{self.path}: row {index + 1}"


class ArrowRows:
    """Rows of a columnar file."""

    def __init__(self, path: Path, table: pa.Table) -> None:
        self.path, self._table = path, table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return table_row(self._table.slice(index, 1))

    def where(self, index: int) -> str:
        return f"{self.path}: row {index + 1}"


def table_row(table: pa.Table) -> Row:
    """The only row of a table."""
    try:
        return table.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise RowError(f"a text of it is not UTF-8: {error.reason}") from None


def _decode(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8. Convert the file, "
            "for example with iconv."
        ) from None


def is_json_array(path: Path) -> bool:
    """Whether a .json file is one array; otherwise it has JSON lines."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def _read_json(path: Path) -> Source:
    """A JSON array of objects, or JSON lines under the name .json."""
    if not is_json_array(path):
        return Lines(path, parse_json_line)
    try:
        return Rows(path, json.loads(_decode(path)))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: JSON that cannot be read: {error}") from None


def _read_csv(path: Path) -> Source:
    csv.field_size_limit(2**31 - 1)  # by default a text of 128 KiB is an error
    reader = csv.DictReader(io.StringIO(_decode(path), newline=""))
    rows, lines = [], []
    try:
        for row in reader:
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    return Rows(path, rows, lines)


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turns what PyArrow says of a broken file into one message."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not {kind} file, or a broken one: {error}") from None


def _read_parquet(path: Path) -> Source:
    with readable(path, "a parquet"):
        return ArrowRows(path, pq.read_table(path, memory_map=True))


def _read_arrow(path: Path) -> Source:
    with readable(path, "an arrow"):
        mapped = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(mapped).read_all()
        table.validate()
        return ArrowRows(path, table)


_READERS: dict[str, Callable[[Path], Source]] = {
    ".json": _read_json,
    ".jsonl": partial(Lines, parse=parse_json_line),
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
    ".txt": partial(Lines, parse=parse_text_line),
}


def data_files(path: Path) -> list[Path]:
    """The file, or all data files of the folder and its subfolders in the order of their names."""
    files = [path]
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix in _READERS and file.name != "dataset_info.json")
        files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    known = ", ".join(_READERS)
    if not files:
        raise DataError(f"{path}: no data file in this folder; known are {known}.")
    for file in files:
        if file.suffix not in _READERS:
            raise DataError(f"{file}: unknown kind of data file {file.suffix!r}; known are {known}.")
    return files


def open_source(file: Path) -> Source:
    """The rows of one of ``data_files``."""
    return _READERS[file.suffix](file)
