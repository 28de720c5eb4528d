"""``data.streaming``: rows that are prepared while the model trains on those before them.

The raw rows of all data sets come as one stream, cut into blocks of ``buffer_size``. A block is shuffled, dealt out to
the ranks row by row, and every rank encodes its own share, a chunk at a time ::

    stream          0 1 2 3 4 5 | 6 7 8 9 10 11 | ...        buffer_size 6, world_size 2
    shuffled        4 1 0 5 3 2 | 9 11 6 8 10 7 | ...
    rank 0          4   0   3   |    11  8   7  |            begins one rank later in each block, so that a
    rank 1            1   5   2 | 9    6   10   |            remainder does not always go to the same rank

A place in it is a place in the files and a few counts, so a run is resumed without reading what came before the block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from mindspeed_llm.data.collate import Batch, Collator
from mindspeed_llm.data.mixing import MixStrategy
from mindspeed_llm.data.packing import cut_stream
from mindspeed_llm.data.prepare import Chunk, ChunkEncoder
from mindspeed_llm.data.report import Report
from mindspeed_llm.data.specs import DatasetSpec
from mindspeed_llm.data.store import Row
from mindspeed_llm.data.stream import RawRow, RawStream
from mindspeed_llm.errors import DataError, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StreamedData:
    """What is streamed and how: the same on every rank."""

    specs: Sequence[DatasetSpec]
    encode: ChunkEncoder
    buffer_size: int
    chunk_size: int
    seed: int
    shuffle: bool = True
    mix_strategy: MixStrategy = "concat"
    interleave_probs: Sequence[float] | None = None
    row_length: int | None = None
    """Documents are one text that is cut into rows of this length, chunk by chunk; None: rows are as encoded."""
    max_bad_rows: int | None = None

    def first_row(self) -> Row:
        """To be looked at before a run; the first of what the files hold first."""
        small = replace(self, buffer_size=self.chunk_size)
        return next(iter(RowStream(small)))


class RowStream:
    """The rows of one rank, without end. ``position`` is the place behind the row that was yielded last."""

    def __init__(self, data: StreamedData, rank: int = 0, world_size: int = 1) -> None:
        if data.buffer_size < world_size:
            raise DataError(f"data.buffer_size: {data.buffer_size} rows cannot be dealt out to {world_size} ranks")
        self.data = data
        self.rank = rank
        self.world_size = world_size
        self.position: dict[str, Any] = {"raw": None, "block": 0, "chunk": 0, "row": 0}
        self._report = Report("train", rows_read=0)

    def __iter__(self) -> Iterator[Row]:
        seen = self.position["row"]
        for position, rows in _one_ahead(self._chunks(**self.position)):
            for number, row in enumerate(rows[seen:], start=seen + 1):
                self.position = position | {"row": number}
                yield row
            seen = 0

    def _chunks(self, raw: dict[str, Any] | None, block: int, chunk: int, row: int) -> Iterator[tuple[dict, list[Row]]]:
        """Chunk after chunk, with the position at which it begins."""
        data = self.data
        stream = RawStream(data.specs, data.mix_strategy, data.interleave_probs, data.seed, raw)
        last_use = 0  # the pass in which this rank found a row to train on
        while True:
            start = stream.position
            share = self._share(stream.block(data.buffer_size), block)
            for number in range(chunk, -(-len(share) // data.chunk_size)):
                items = share[number * data.chunk_size : (number + 1) * data.chunk_size]
                rows = self._encode(items, [data.seed, block, self.rank, number])
                last_use = stream.passes if rows else last_use
                yield {"raw": start, "block": block, "chunk": number}, rows
            if stream.passes > last_use + self.world_size:  # by then every rank had a share of every block
                raise DataError(f"data train: no row of the stream can be used:\n{self._report.why_empty()}")
            block, chunk = block + 1, 0

    def _share(self, rows: list[RawRow], block: int) -> list[RawRow]:
        """This rank's part of a shuffled block."""
        order = np.arange(len(rows))
        if self.data.shuffle:
            np.random.default_rng([self.data.seed, block]).shuffle(order)
        return [rows[index] for index in order[(self.rank + block) % self.world_size :: self.world_size]]

    def _encode(self, raw_rows: Sequence[RawRow], seed: list[int]) -> list[Row]:
        chunk = self.data.encode([row.item() for row in raw_rows])
        self._watch(chunk, len(raw_rows))
        rows = _rows(chunk, self.data.row_length)
        if self.data.shuffle:  # packing has sorted them by length
            np.random.default_rng(seed).shuffle(rows)
        return rows

    def _watch(self, chunk: Chunk, rows: int) -> None:
        """Tell the first rows that cannot be used, and stop when there are too many."""
        shown = len(self._report.examples)
        self._report.rows_read += rows
        self._report.add(chunk.tally)
        for where, reason in self._report.examples[shown:]:
            logger.warning("%s: row skipped: %s", where, reason)
        limit = self.data.max_bad_rows
        if limit is not None and self._report.skipped > limit:
            raise DataError(
                f"data train: more than data.max_bad_rows = {limit} rows cannot be used:\n{self._report.problems()}"
            )


class StreamLoader:
    """Yields the micro-batches of one optimizer step after the other, ``num_steps`` in all, for one rank of several.

    Ranks go through their shares at their own pace, as packing and unusable rows have it, and never run out.
    ``gather`` brings together what each rank passes to it; ``state_dict`` is collective, as only a rank itself knows
    where it stands.
    """

    def __init__(
        self,
        rows: RowStream,
        *,
        batch_size: int,
        accumulation: int,
        num_steps: int,
        collate: Collator,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.num_steps = num_steps
        self.step = 0
        self._collate = collate
        self._gather = gather

    def __len__(self) -> int:
        """Steps of the run, which is one epoch whatever it reads."""
        return self.num_steps

    def __iter__(self) -> Iterator[list[Batch]]:
        rows = iter(self.rows)
        while self.step < self.num_steps:
            window = [self._collate(list(islice(rows, self.batch_size))) for _ in range(self.accumulation)]
            self.step += 1
            yield window

    def state_dict(self) -> dict[str, Any]:
        """The place of every rank behind the last step. Collective."""
        places = self._gather({self.rows.rank: self.rows.position})
        return {"step": self.step, "ranks": {str(rank): place for part in places for rank, place in part.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the step that was saved. Raises ``UserError`` on another number of ranks."""
        if len(state["ranks"]) != self.rows.world_size:
            raise UserError(
                f"data.streaming: a run of {len(state['ranks'])} data-parallel ranks cannot go on with "
                f"{self.rows.world_size}: each rank's place in the stream is its own; prepared data can"
            )
        self.step = state["step"]
        self.rows.position = state["ranks"][str(self.rows.rank)]


def _rows(chunk: Chunk, row_length: int | None) -> list[Row]:
    """The rows of a chunk one by one."""
    lengths, row_sizes = chunk.lengths, chunk.row_sizes
    if row_length is not None:
        pieces = list(cut_stream(lengths, row_length, drop_rest=False))
        lengths, row_sizes = [length for row in pieces for length in row], list(map(len, pieces))
    labels = chunk.input_ids if chunk.labels is None else chunk.labels
    rows: list[Row] = []
    document = start = 0
    for size in row_sizes:
        own = np.array(lengths[document : document + size], np.int64)
        end = start + int(own.sum())
        rows.append(Row(input_ids=chunk.input_ids[start:end], labels=labels[start:end], lengths=own))
        document, start = document + size, end
    return rows


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each of which is made while the one before it is in use."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, iterator, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, iterator, None)
            yield item
