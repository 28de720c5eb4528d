"""All-to-all that need not wait: rows travel while the rank goes on computing, and so do their gradients.

It is PyTorch's functional operator and not a call of ``torch.distributed``, so that selective recomputation can keep
what arrived (``recompute.KEPT``) instead of sending it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """Which rows the ranks of a group send each other."""

    group: dist.ProcessGroup
    send_sizes: list[int]
    """Rows for each rank of the group."""
    receive_sizes: list[int]
    """Rows from each rank of the group."""

    def start(self, rows: Tensor) -> Journey:
        """Start to send ``rows [sent, ...]``, those for rank 0 first. Collective, and so is its backward.

        Between the start and the arrival there is time to compute something else. In backward the gradients start where
        the rows arrived, and arrive where the rows started.
        """
        journey = Journey(self)
        journey.rows = _Start.apply(rows, journey)
        return journey

    def __call__(self, rows: Tensor) -> Tensor:
        """Send ``rows [sent, ...]`` and wait for those that come: ``[received, ...]``."""
        return self.start(rows).arrive()

    @property
    def back(self) -> Exchange:
        """The opposite way."""
        return Exchange(self.group, self.receive_sizes, self.send_sizes)


def even_exchange(size: int, group: dist.ProcessGroup) -> Exchange:
    """The exchange of ``size`` rows, of which every rank gets as many as the others."""
    sizes = [size // group.size()] * group.size()
    return Exchange(group, sizes, sizes)


@dataclass
class Journey:
    """Rows under way to this rank, and later their gradients under way from it."""

    exchange: Exchange
    rows: Tensor = field(init=False, repr=False)
    gradients: Tensor = field(init=False, repr=False)

    def arrive(self) -> Tensor:
        """Wait for the rows ``[received, ...]``. Once only."""
        rows = self.rows
        del self.rows  # they lead through the graph back to this journey: a circle, which would keep them alive
        return _Arrive.apply(rows, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return _start(rows, journey.exchange)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        gradients = ctx.journey.gradients
        del ctx.journey.gradients
        return _wait(gradients), None


class _Arrive(torch.autograd.Function):
    """Its gradient is for the order alone: what is under way has another shape than autograd expects of it here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return _wait(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.journey.gradients = _start(gradient, ctx.journey.exchange.back)
        return gradient.new_zeros(()).expand(gradient.shape), None


def _start(rows: Tensor, exchange: Exchange) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(
        rows.contiguous(), exchange.receive_sizes, exchange.send_sizes, exchange.group.group_name
    )


def _wait(rows: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(rows)
