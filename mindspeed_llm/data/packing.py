"""Which samples share a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence


def greedy_knapsack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group samples into rows of at most ``capacity`` tokens: indices of the samples of each row, in order.

    Every row takes the longest sample that still fits, again and again; among equally long ones the last. This is
    LLaMA-Factory's order. Samples longer than the capacity are left out.
    """
    left: list[tuple[int, int]] = sorted((length, index) for index, length in enumerate(lengths) if length <= capacity)
    rows = []
    while left:
        row, room = [], capacity
        while fits := bisect_right(left, (room, len(lengths))):
            length, index = left.pop(fits - 1)
            row.append(index)
            room -= length
        rows.append(row)
    return rows


def cut_stream(lengths: Sequence[int], row_length: int, *, drop_rest: bool) -> Iterator[list[int]]:
    """Cut the concatenation of documents into rows of ``row_length`` tokens.

    Yields for each row the lengths of the pieces of documents in it; the last row is shorter, or left out.
    """
    row: list[int] = []
    room = row_length
    for length in lengths:
        while length:
            piece = min(length, room)
            row.append(piece)
            length -= piece
            room -= piece
            if not room:
                yield row
                row, room = [], row_length
    if row and not drop_rest:
        yield row
