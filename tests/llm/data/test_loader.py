"""Every row once per epoch, equally many micro-batches everywhere, and resuming that changes nothing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.collate import Batch
from mindspeed_llm.data.loader import EvalLoader, StepLoader
from mindspeed_llm.data.store import Row


class NumberedRows:
    """Row *i* is made of the token *i* + 1, so that batches show which rows they hold."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def row_lengths(self) -> np.ndarray:
        return 2 + np.arange(self.size) % 3

    def __getitem__(self, index: int) -> Row:
        tokens = np.full(2 + index % 3, index + 1, np.int32)
        return Row(input_ids=tokens, labels=tokens, lengths=np.array([len(tokens)]))


def loader(rows: int, rank: int = 0, world_size: int = 1, **options: int | bool) -> StepLoader:
    return StepLoader(
        NumberedRows(rows), rank=rank, world_size=world_size, pad_token_id=0, **{"batch_size": 2, **options}
    )  # type: ignore[arg-type]


def rows_in(batches: Sequence[Batch]) -> list[int]:
    firsts = torch.cat([batch["input_ids"][:, 0] for batch in batches]) if batches else torch.zeros(0)
    return [int(token) - 1 for token in firsts if token]


def rows_of(windows: Sequence[Sequence[Batch]]) -> list[list[int]]:
    return [rows_in(window) for window in windows]


sizes = st.integers(0, 41)
layouts = {
    "batch_size": st.integers(1, 5),
    "world_size": st.integers(1, 5),
    "accumulation": st.integers(1, 4),
    "seed": st.integers(0, 100),
}


@settings(deadline=None, max_examples=60)
@given(rows=sizes, shuffle=st.booleans(), **layouts)
def test_every_row_once_over_all_ranks(
    rows: int, shuffle: bool, batch_size: int, world_size: int, accumulation: int, seed: int
) -> None:
    options = {"batch_size": batch_size, "accumulation": accumulation, "seed": seed, "shuffle": shuffle}
    ranks = [list(loader(rows, rank, world_size, **options)) for rank in range(world_size)]
    assert sorted(row for windows in ranks for window in rows_of(windows) for row in window) == list(range(rows))
    # the same number of micro-batches in every step, whatever rows are left for a rank
    shapes = {tuple(len(window) for window in windows) for windows in ranks}
    assert len(shapes) == 1
    micro_batches = -(-rows // (batch_size * world_size))
    assert sum(*shapes) == micro_batches
    assert len(*shapes) == len(loader(rows, 0, world_size, **options)) == -(-micro_batches // accumulation)
    # a batch is either of rows, or stands in for them and has no targets
    for batch in itertools.chain.from_iterable(window for windows in ranks for window in windows):
        assert bool((batch["labels"] != -100).any()) == bool(rows_in([batch]))
        assert batch.num_tokens == sum(2 + row % 3 for row in rows_in([batch]))


@settings(deadline=None, max_examples=60)
@given(rows=sizes, drop_last=st.booleans(), epoch=st.integers(0, 3), **layouts)
def test_order_is_the_documented_one(
    rows: int, drop_last: bool, epoch: int, batch_size: int, world_size: int, accumulation: int, seed: int
) -> None:
    """Global micro-batch g takes rows [g·W·b, (g+1)·W·b) of randperm(seed + epoch), rank r the r-th run of b."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    full = rows // (batch_size * world_size) * batch_size * world_size
    kept = order[:full] if drop_last else order
    for rank in range(world_size):
        options = {"batch_size": batch_size, "accumulation": accumulation, "seed": seed, "drop_last": drop_last}
        one = loader(rows, rank, world_size, **options)
        one.load_state_dict({"epoch": epoch, "row": 0})
        runs = [kept[i : i + batch_size] for i in range(rank * batch_size, len(kept), batch_size * world_size)]
        steps = [list(itertools.chain(*runs[i : i + accumulation])) for i in range(0, len(runs), accumulation)]
        assert [rows for rows in rows_of(list(one)) if rows] == [rows for rows in steps if rows]


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 23), stops=st.lists(st.integers(0, 5), max_size=4), **layouts)
def test_resuming_at_any_points_changes_nothing(
    rows: int, stops: list[int], batch_size: int, world_size: int, accumulation: int, seed: int
) -> None:
    options = {"batch_size": batch_size, "accumulation": accumulation, "seed": seed}
    rank = seed % world_size
    steps = sum(stops) + 4
    endless = itertools.chain.from_iterable(itertools.repeat(loader(rows, rank, world_size, **options)))
    uninterrupted = rows_of(list(itertools.islice(endless, steps)))

    resumed: list[list[int]] = []
    state = {"epoch": 0, "row": 0}
    for run in [*stops, 4]:
        one = loader(rows, rank, world_size, **options)
        one.load_state_dict(state)
        windows = itertools.islice(itertools.chain.from_iterable(itertools.repeat(one)), run)
        resumed += rows_of(list(windows))
        state = one.state_dict()
    assert resumed == uninterrupted


def test_state_names_the_next_row_whatever_was_prefetched() -> None:
    one = loader(20, accumulation=2, num_workers=2)
    windows = iter(one)
    assert one.state_dict() == {"epoch": 0, "row": 0}
    for step in range(1, 5):
        next(windows)
        assert one.state_dict() == {"epoch": 0, "row": step * 4}
    next(windows)
    assert one.state_dict() == {"epoch": 1, "row": 0}


def test_fewer_ranks_go_on_at_the_same_row(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)  # a run in this process stops it
    two = [loader(23, rank, 2, batch_size=2, seed=3) for rank in range(2)]
    seen = [row for windows in zip(*two, strict=True) for window in rows_of(list(windows)) for row in window]
    stopped = [iter(loader(23, rank, 2, batch_size=2, seed=3)) for rank in range(2)]
    first = [row for _ in range(3) for rank in stopped for row in rows_of([next(rank)])[0]]
    state = two[0].state_dict() | {"epoch": 0, "row": 12}  # three steps of four rows

    one = loader(23, batch_size=2, seed=3)
    one.load_state_dict(state)
    assert first + [row for window in rows_of(list(one)) for row in window] == seen
    assert not caplog.records

    odd = loader(23, batch_size=5, seed=3)
    odd.load_state_dict(state)
    assert rows_of([next(iter(odd))])[0] == seen[10:15]
    assert "steps have other rows now: the last 2 rows are taken again" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_do_not_change_batches_or_random_numbers(num_workers: int) -> None:
    torch.manual_seed(0)
    expected = [window[0]["input_ids"] for window in loader(9)]
    before = torch.get_rng_state()
    windows = list(loader(9, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)  # dropout after a resume must not depend on the loader
    assert all(torch.equal(window[0]["input_ids"], ids) for window, ids in zip(windows, expected, strict=True))
    assert [window[0].num_tokens for window in windows] == [window[0].num_tokens for window in loader(9)]


def test_epochs_differ_and_repeat() -> None:
    one, other = loader(50, seed=1), loader(50, seed=1)
    first, second = rows_of(list(one)), rows_of(list(one))
    assert first != second
    assert [rows_of(list(other)), rows_of(list(other))] == [first, second]


def test_breaking_off_and_going_on() -> None:
    one = loader(10)
    begun = rows_of(list(itertools.islice(one, 2)))
    assert begun + rows_of(list(one)) == rows_of(list(loader(10)))


@settings(deadline=None, max_examples=60)
@given(rows=sizes, batch_size=st.integers(1, 5), world_size=st.integers(1, 5))
def test_evaluation_sees_every_row_once(rows: int, batch_size: int, world_size: int) -> None:
    loaders = [
        EvalLoader(NumberedRows(rows), batch_size=batch_size, rank=rank, world_size=world_size, pad_token_id=0)
        for rank in range(world_size)
    ]
    batches = [list(one) for one in loaders]
    assert {len(one) for one in batches} == {len(loaders[0])}
    in_order = [row for step in zip(*batches, strict=True) for row in rows_in(list(step))]
    assert in_order == list(range(rows))
