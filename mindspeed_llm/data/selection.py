"""Which rows of which files are prepared, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.data.mixing import MixStrategy, mixed_order
from mindspeed_llm.data.null_filling import NullFilled
from mindspeed_llm.data.prepare import Item
from mindspeed_llm.data.sources import Source, data_files, open_source
from mindspeed_llm.data.specs import DatasetSpec
from mindspeed_llm.errors import DataError


class Selection:
    """Rows of several data sets, mixed.

    ``rows [n, 2]`` holds for each the position of its file in ``sources`` and its index in the file.
    """

    def __init__(
        self,
        specs: Sequence[DatasetSpec],
        *,
        max_samples: int | None,
        seed: int,
        mix_strategy: MixStrategy = "concat",
        interleave_probs: Sequence[float] | None = None,
        fill_nulls: bool = False,
    ) -> None:
        self.sources: list[tuple[DatasetSpec, Source]] = []
        selected = []
        for spec in specs:
            addresses = []
            for file in data_files(spec.path):
                source = open_source(file)
                if fill_nulls:
                    source = NullFilled(source)
                addresses.append(np.stack([np.full(len(source), len(self.sources)), np.arange(len(source))], axis=1))
                self.sources.append((spec, source))
            selected.append(_take(np.concatenate(addresses), spec.num_samples, max_samples, seed))
        sizes = list(map(len, selected))
        if mix_strategy != "concat" and 0 in sizes:
            raise DataError(f"data.mix_strategy: {mix_strategy}: data set {specs[sizes.index(0)].name!r} has no rows")
        self.rows = np.concatenate(selected)[mixed_order(sizes, mix_strategy, interleave_probs, seed)]

    def __len__(self) -> int:
        return len(self.rows)

    def hold_out(self, val_size: float, seed: int, *, keep_held_out: bool) -> None:
        """Keep one of the two parts of a permutation: the rows held out for evaluation, or the others.

        ``val_size`` is a fraction below 1, rounded up, or a number of rows. This is the split of LLaMA-Factory.
        """
        size = int(val_size) if val_size >= 1 else int(np.ceil(len(self.rows) * val_size))
        if size >= len(self.rows):
            raise DataError(f"data.val_size: {val_size:g} leaves nothing of {len(self.rows)} rows to train on")
        order = np.random.default_rng(seed).permutation(len(self.rows))
        self.rows = self.rows[order[:size] if keep_held_out else order[size:]]

    def chunks(self, size: int) -> Iterator[Sequence[Item]]:
        """The rows, ``size`` at a time."""
        items = (self._item(position, index) for position, index in self.rows.tolist())
        while chunk := list(islice(items, size)):
            yield chunk

    def _item(self, position: int, index: int) -> Item:
        spec, source = self.sources[position]
        try:
            return Item(spec, source.where(index), source[index])
        except RowError as error:
            return Item(spec, source.where(index), error)

    def unused_columns(self) -> list[str]:
        """Columns of the files' first rows that no part of a conversation is read from."""
        unused: dict[str, None] = {}
        for spec, source in self.sources:
            try:
                unused |= {column: None for column in source[0] if column not in spec.columns.values()}
            except (RowError, IndexError):
                continue
        return list(unused)


def _take(rows: np.ndarray, num_samples: int | None, max_samples: int | None, seed: int) -> np.ndarray:
    """``num_samples`` rows at random, each once before any is taken twice; then the first ``max_samples``."""
    if num_samples is not None and len(rows):
        generator = np.random.default_rng(seed)
        rounds = -(-num_samples // len(rows))
        rows = rows[np.concatenate([generator.permutation(len(rows)) for _ in range(rounds)])[:num_samples]]
    return rows[:max_samples]
