"""Start and end of the process group. One process is a group of one: there is a single code path."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm.foundation.device import collective_backend, select_device

# Preparing data or loading weights on rank 0 can take long while the others wait in a collective.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Distributed:
    """This process's place in the job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over all ranks; the same floats everywhere. Collective."""
        total = torch.tensor(values, dtype=torch.float64)  # on the host: gloo adds in a fixed order
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, everywhere. Collective."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        self.sum([0.0])


@contextmanager
def start() -> Iterator[Distributed]:
    """Join the job that torchrun described in the environment, or be a job of one process without any port."""
    rank, world_size, local_rank = (int(os.environ.get(k, d)) for k, d in _ENVIRONMENT)
    device = select_device(local_rank)
    if "RANK" in os.environ:
        dist.init_process_group(collective_backend(device), timeout=_TIMEOUT)
    else:
        dist.init_process_group(collective_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    failed = True
    try:
        yield Distributed(rank, world_size, local_rank, device)
        dist.barrier()  # gloo aborts a rank whose last collective is still under way when another rank closes
        failed = False
    finally:
        # A rank that fails among others leaves the group when it has told why: if it left now, the others would fail
        # for want of it, and tell that first.
        if failed and world_size > 1:
            atexit.register(dist.destroy_process_group)
        else:
            dist.destroy_process_group()


_ENVIRONMENT = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
