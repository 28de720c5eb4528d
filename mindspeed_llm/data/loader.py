"""The order in which rows reach the ranks: a pure function of seed, epoch and position."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from mindspeed_llm.data.collate import Batch, Collator, Quirks
from mindspeed_llm.data.store import Row
from mindspeed_llm.data.token_budget import TokenBudget

logger = logging.getLogger(__name__)


class RowDataset(Protocol):
    """Anything with rows in it, such as ``TokenRows``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    @property
    def row_lengths(self) -> np.ndarray: ...


class StepLoader:
    """Yields, for one data-parallel rank, the micro-batches of one optimizer step after the other.

    Epoch *e* goes through ``torch.randperm(n)`` seeded with ``seed + e`` (through ``range(n)`` without ``shuffle``).
    Global micro-batch *g* takes the next ``world_size * batch_size`` rows, rank *r* the *r*-th run of ``batch_size``
    of them, and a step is ``accumulation`` micro-batches ::

        rows in order   0 1 2 3 | 4 5 6 7 | 8 9          batch_size 2, world_size 2, accumulation 2
        rank 0          0 1       4 5     | 8 9
        rank 1              2 3       6 7 | (no rows: a batch without targets)
                        `--- step 0 ----' ` step 1

    Every row is used once per epoch; the last micro-batch may have fewer rows and the last step fewer micro-batches
    (``drop_last`` leaves out the micro-batch that is not full on every rank). All ranks get equally many micro-batches.

    Iterating goes from the present position to the end of the epoch; the next iteration is the next epoch.
    With ``max_tokens`` a batch has as many rows as that many tokens hold (``TokenBudget``) instead of ``batch_size``.

    ``state_dict()`` at any time names the row that comes next, whatever was prefetched.
    """

    def __init__(
        self,
        dataset: RowDataset,
        *,
        batch_size: int,
        max_tokens: int | None = None,
        accumulation: int = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pad_token_id: int,
        pad_to_multiple: int = 8,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        quirks: Quirks | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.epoch = 0
        self.step = 0  # within the epoch, the next one
        self._collate = Collator(pad_token_id, pad_to_multiple, quirks)
        self._budget = None
        if max_tokens is not None:
            self._budget = TokenBudget(dataset.row_lengths, max_tokens, pad_to_multiple, is_sorted=shuffle)

    @property
    def num_batches(self) -> int:
        """Batches per epoch, of all ranks together."""
        if self._budget is not None:
            return len(self._budget)
        return len(self.dataset) // self.batch_size if self.drop_last else -(-len(self.dataset) // self.batch_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        return self.num_batches // self.world_size if self.drop_last else -(-self.num_batches // self.world_size)

    def __len__(self) -> int:
        """Steps per epoch."""
        return -(-self.num_micro_batches // self.accumulation)

    def __iter__(self) -> Iterator[list[Batch]]:
        if self.step >= len(self):
            self.epoch, self.step = self.epoch + 1, 0
        left = range(self.step * self.accumulation, self.num_micro_batches)
        rows = _rank_rows(*self._plan(), left, self.rank, self.world_size)
        batches = iter(_batches(self.dataset, rows, self._collate, self.num_workers))
        while self.step < len(self):
            size = min(self.accumulation, self.num_micro_batches - self.step * self.accumulation)
            window = [next(batches) for _ in range(size)]
            self.step += 1  # before the step is taken: a checkpoint written after it must not repeat it
            yield window

    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of this epoch in their order, and where in it each batch ends."""
        size, seed = len(self.dataset), self.seed + self.epoch
        order = np.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
        if self._budget is not None:
            return self._budget.order(order, np.random.default_rng(seed))
        return order, _even_ends(size, self.batch_size)

    @property
    def batches_per_step(self) -> int:
        """Batches of a full step on all ranks."""
        return self.world_size * self.accumulation

    def state_dict(self) -> dict[str, int]:
        """Epoch and row that come next. The row is its place in the epoch's order, which no batch size changes."""
        if self.step >= len(self):
            return {"epoch": self.epoch + 1, "row": 0}
        return {"epoch": self.epoch, "row": self._row_of(self.step)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a loader stood, also one of other ranks and batch sizes: then at the last whole step before."""
        self.epoch, row = state["epoch"], state["row"]
        self.step = int(np.searchsorted(self._ends(), row, side="right")) // self.batches_per_step
        if repeated := row - self._row_of(self.step):
            logger.warning("steps have other rows now: the last %d rows are taken again", repeated)

    def _row_of(self, step: int) -> int:
        """The first row of a step of this epoch."""
        return int(self._ends()[step * self.batches_per_step - 1]) if step else 0

    def _ends(self) -> np.ndarray:
        """Where each batch of this epoch ends, in rows."""
        return self._plan()[1] if self._budget is not None else _even_ends(len(self.dataset), self.batch_size)


class EvalLoader:
    """Yields every row once over all ranks, in order; all ranks get equally many batches, some without targets."""

    def __init__(
        self,
        dataset: RowDataset,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        pad_token_id: int,
        pad_to_multiple: int = 8,
        num_workers: int = 0,
        quirks: Quirks | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self._collate = Collator(pad_token_id, pad_to_multiple, quirks)

    def __len__(self) -> int:
        """Batches, the same number on every rank."""
        return -(-len(self.dataset) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        order, ends = np.arange(len(self.dataset)), _even_ends(len(self.dataset), self.batch_size)
        rows = _rank_rows(order, ends, range(len(self)), self.rank, self.world_size)
        return iter(_batches(self.dataset, rows, self._collate, self.num_workers))


def _even_ends(rows: int, batch_size: int) -> np.ndarray:
    """Where batches of equal size end; the last one may be smaller."""
    return np.append(np.arange(batch_size, rows, batch_size), rows) if rows else np.zeros(0, np.int64)


def _rank_rows(
    order: np.ndarray, ends: np.ndarray, micro_batches: Iterable[int], rank: int, world_size: int
) -> Iterator[list[int]]:
    """The rows of this rank in each of the global micro-batches; none where no batch is left for it."""
    for micro_batch in micro_batches:
        batch = micro_batch * world_size + rank
        if batch < len(ends):
            yield order[ends[batch - 1] if batch else 0 : ends[batch]].tolist()
        else:
            yield []


def _batches(dataset: RowDataset, rows: Iterator[list[int]], collate: Collator, num_workers: int) -> DataLoader[Batch]:
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=rows,
        collate_fn=collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # so that iterating does not draw from the global one, which dropout uses
    )
