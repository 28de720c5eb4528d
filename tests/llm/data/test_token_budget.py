"""Batches by tokens: every row once, never too many tokens, as many batches on every rank and in every epoch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_llm.data.collate import Batch
from mindspeed_llm.data.loader import StepLoader
from mindspeed_llm.data.store import Row
from mindspeed_llm.data.token_budget import TokenBudget
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.loss import cross_entropy_sum


class RowsOfLengths:
    """Row *i* has ``lengths[i]`` tokens *i* + 1."""

    def __init__(self, lengths: list[int]) -> None:
        self.row_lengths = np.array(lengths, np.int64)

    def __len__(self) -> int:
        return len(self.row_lengths)

    def __getitem__(self, index: int) -> Row:
        tokens = np.full(self.row_lengths[index], index + 1, np.int32)
        return Row(input_ids=tokens, labels=tokens, lengths=np.array([len(tokens)]))


def loader(lengths: list[int], rank: int = 0, world_size: int = 1, **options: Any) -> StepLoader:
    options = {"max_tokens": 32, "accumulation": 2, "seed": 7} | options
    dataset = RowsOfLengths(lengths)
    return StepLoader(dataset, batch_size=1, rank=rank, world_size=world_size, pad_token_id=0, **options)


def rows_in(batch: Batch) -> list[int]:
    return [int(token) - 1 for token in batch["input_ids"][:, 0] if token]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 32), max_size=40),
    world_size=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_row_once_within_the_budget(
    lengths: list[int], world_size: int, accumulation: int, shuffle: bool
) -> None:
    options = {"accumulation": accumulation, "shuffle": shuffle}
    counts = set()
    for epoch in range(3):
        ranks = [loader(lengths, rank, world_size, **options) for rank in range(world_size)]
        for one in ranks:
            one.load_state_dict({"epoch": epoch, "row": 0})
        windows = [list(one) for one in ranks]
        batches = list(itertools.chain.from_iterable(itertools.chain.from_iterable(windows)))
        assert sorted(row for batch in batches for row in rows_in(batch)) == list(range(len(lengths)))
        assert all(batch["input_ids"].numel() <= 32 for batch in batches)
        assert len({tuple(map(len, of_rank)) for of_rank in windows}) == 1
        counts.add(sum(bool(rows_in(batch)) for batch in batches))
    assert len(counts) == 1  # of batches, in every epoch
    if not shuffle and lengths:  # as they come
        steps = zip(*(itertools.chain.from_iterable(of_rank) for of_rank in windows), strict=True)
        assert [row for step in steps for batch in step for row in rows_in(batch)] == list(range(len(lengths)))


def test_a_batch_has_room_for_no_further_row() -> None:
    lengths = [1, 30, 7, 8, 9, 16, 17, 24, 3, 5, 8, 8]
    budget = TokenBudget(np.array(lengths), 32, 8, is_sorted=True)
    rows, ends = budget.order(np.arange(len(lengths)), np.random.default_rng(0))
    widths = [sorted(budget.widths[batch].tolist()) for batch in np.split(rows, ends[:-1])]
    assert sorted(widths) == [[8, 8, 8], [8, 8, 8, 8], [16, 16], [24], [24], [32]]


def test_epochs_mix_rows_of_a_width_and_order_batches_anew() -> None:
    one = loader([5] * 40)
    epochs = [[tuple(rows_in(batch)) for window in one for batch in window] for _ in range(2)]
    assert set(epochs[0]) != set(epochs[1])
    assert [row for batch in epochs[0] for row in batch] != list(range(40))
    again = loader([5] * 40)
    assert [[tuple(rows_in(batch)) for window in again for batch in window] for _ in range(2)] == epochs
    widths = [batch["input_ids"].shape[1] for window in loader([4, 12, 20, 28] * 9) for batch in window]
    assert widths != sorted(widths)


@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_at_any_step_changes_nothing(shuffle: bool) -> None:
    lengths = [1 + (7 * index) % 31 for index in range(29)]
    for rank in range(2):
        endless = itertools.chain.from_iterable(itertools.repeat(loader(lengths, rank, 2, shuffle=shuffle)))
        whole = [[rows_in(batch) for batch in window] for window in itertools.islice(endless, 12)]
        for stop in range(1, 12):
            first = loader(lengths, rank, 2, shuffle=shuffle)
            windows = itertools.chain.from_iterable(itertools.repeat(first))
            list(itertools.islice(windows, stop))
            rest = loader(lengths, rank, 2, shuffle=shuffle)
            rest.load_state_dict(first.state_dict())
            windows = itertools.chain.from_iterable(itertools.repeat(rest))
            left = [[rows_in(batch) for batch in window] for window in itertools.islice(windows, 12 - stop)]
            assert left == whole[stop:]


def test_fewer_ranks_go_on_at_the_same_batch() -> None:
    lengths = [1 + (7 * index) % 31 for index in range(29)]
    two = [loader(lengths, rank, 2) for rank in range(2)]
    seen = [row for one in two for batch in next(iter(one)) for row in rows_in(batch)]
    one = loader(lengths, accumulation=2)
    one.load_state_dict(two[0].state_dict())
    rest = [row for window in one for batch in window for row in rows_in(batch)]
    assert sorted(seen + rest) == list(range(29))


def test_a_row_that_no_batch_can_hold() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens_per_batch: 32 has no room for the longest row, .* padded to 40"):
        loader([3, 33])


def test_the_loss_of_an_epoch_is_that_of_single_rows() -> None:
    """However rows are put together, the sum of the losses is the same, and with it the gradient."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, bos_token_id=None, eos_token_id=None)).double()
    lengths = [1 + (5 * index) % 23 for index in range(17)]

    def loss_and_gradient(**options: Any) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = 0.0
        for window in loader(lengths, **options):
            for batch in window:
                loss = cross_entropy_sum(model, dict(batch))[0]
                loss.backward()
                total += loss.item()
        return total, model.model.embed_tokens.weight.grad.clone()  # type: ignore[union-attr]

    one_by_one, gradient = loss_and_gradient(max_tokens=None)
    by_tokens, other_gradient = loss_and_gradient(max_tokens=64)
    # cross_entropy_sum adds in float32
    assert by_tokens == pytest.approx(one_by_one, rel=1e-6)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-5, atol=1e-6)
