"""Rows of packed samples, and pretraining text cut into rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.packing import cut_stream, greedy_knapsack


def test_the_longest_that_fits_and_the_last_of_equals() -> None:
    assert greedy_knapsack([3, 5, 3, 2, 9], capacity=8) == [[1, 2], [0, 3]]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(1, 30))
def test_every_sample_that_fits_once_and_no_row_too_long(lengths: list[int], capacity: int) -> None:
    rows = greedy_knapsack(lengths, capacity)
    packed = [index for row in rows for index in row]
    assert sorted(packed) == [index for index, length in enumerate(lengths) if length <= capacity]
    totals = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= capacity for total in totals)
    # a row is closed only when nothing that is left fits
    for position, row in enumerate(rows):
        left = [lengths[index] for later in rows[position + 1 :] for index in later]
        assert not left or min(left) > capacity - sum(lengths[index] for index in row)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=30), row_length=st.integers(1, 25))
def test_a_stream_is_cut_without_losing_a_token(lengths: list[int], row_length: int) -> None:
    rows = list(cut_stream(lengths, row_length, drop_rest=False))
    assert all(sum(row) == row_length for row in rows[:-1])
    assert sum(map(sum, rows)) == sum(lengths)
    cuts = set(np.cumsum([0, *(length for row in rows for length in row)]).tolist())
    assert cuts >= set(np.cumsum([0, *lengths]).tolist())  # documents keep their borders
    full = list(cut_stream(lengths, row_length, drop_rest=True))
    assert full == [row for row in rows if sum(row) == row_length]
