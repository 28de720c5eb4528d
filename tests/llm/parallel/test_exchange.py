"""What an exchange leaves behind: nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mindspeed_llm.parallel.exchange import Exchange

ROWS = 6


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("recomputed", [False, True])
def test_rows_are_freed_without_the_garbage_collector(group, recomputed):
    """A circle of references would keep the rows of all layers until Python happens to look for circles."""
    exchange, journeys = Exchange(group, [ROWS], [ROWS]), []

    def layer(x):
        journey = exchange.start(x * 2)
        journeys.append(weakref.ref(journey))
        return torch.tanh(journey.arrive())

    x = torch.randn(ROWS, 3, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        y.sum().backward()
        expected = 2 * (1 - torch.tanh(2 * x.detach()) ** 2)
        torch.testing.assert_close(x.grad, expected)
        del y
        assert [journey() for journey in journeys] == [None] * (2 if recomputed else 1)
    finally:
        gc.enable()
