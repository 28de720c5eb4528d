"""Rows as LLaMA-Factory's loader hands them on: from a table, in which all objects at a place have the same keys."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.data.sources import Row, Source

_ITEMS = object()  # the key of the shape that all items of a list share
_Shape = dict[Any, Any]  # by key, in the order in which keys were first seen


class NullFilled:
    """The rows of ``source``; keys that a row does not have are null. Reads all rows once beforehand."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.path = source.path
        self._shape: _Shape = {}
        for index in range(len(source)):
            try:
                _note(self._shape, source[index])
            except RowError:
                continue

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        row: Row = _fill(self._shape, self._source[index])
        return row

    def where(self, index: int) -> str:
        return self._source.where(index)


def _note(shape: _Shape, value: Any) -> None:
    """Add the keys of a value, and of everything in it."""
    if isinstance(value, dict):
        for key, part in value.items():
            inner = shape.setdefault(key, {})
            if isinstance(part, dict | list):
                _note(inner, part)
    elif isinstance(value, list):
        for item in value:
            _note(shape.setdefault(_ITEMS, {}), item)


def _fill(shape: _Shape, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fill(part, value.get(key)) for key, part in shape.items() if key is not _ITEMS}
    if isinstance(value, list):
        return [_fill(shape[_ITEMS], item) for item in value]
    return value
