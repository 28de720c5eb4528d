"""In which order the rows of several data sets follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

MixStrategy = Literal["concat", "interleave_under", "interleave_over"]

_BLOCK = 1000  # draws at a time; part of the order, as what a generator draws depends on how much is asked of it


def mixed_order(
    sizes: Sequence[int], strategy: MixStrategy, probabilities: Sequence[float] | None = None, seed: int = 0
) -> np.ndarray:
    """Rows, numbered through all data sets of ``sizes`` rows, in the order of their use. int64 [rows].

    ``concat`` takes one data set after the other. The other strategies take a row of each in turn, or of one that is
    drawn with ``probabilities``; a data set that has come to its end begins again. ``interleave_under`` stops when the
    first has come to its end, ``interleave_over`` when the last one has, so that no row is left out. These orders are
    those of ``datasets.interleave_datasets``, which LLaMA-Factory uses. Neither sizes nor probabilities may be 0.
    """
    if strategy == "concat" or len(sizes) == 1:
        return np.arange(sum(sizes))
    under = strategy == "interleave_under"
    if probabilities is None:
        draws = np.tile(np.arange(len(sizes)), min(sizes) if under else max(sizes))
    else:
        draws = _draw(np.asarray(sizes), draw_blocks(probabilities, seed), under=under)
    order = np.empty(len(draws), np.int64)
    first = 0
    for source, size in enumerate(sizes):
        places = np.flatnonzero(draws == source)
        order[places] = first + np.arange(len(places)) % size
        first += size
    return order


def draw_blocks(probabilities: Sequence[float], seed: int) -> Iterator[np.ndarray]:
    """Data sets drawn with ``probabilities``, a block of them at a time, without end."""
    random = np.random.default_rng(seed)
    while True:
        yield random.choice(len(probabilities), _BLOCK, p=probabilities)


def _draw(sizes: np.ndarray, blocks: Iterator[np.ndarray], *, under: bool) -> np.ndarray:
    """The data set of each row, up to the last row of the first (``under``) or last data set to come to its end."""
    drawn: list[np.ndarray] = []
    counts = np.zeros(len(sizes), np.int64)
    while not (np.any if under else np.all)(counts >= sizes):
        drawn.append(next(blocks))
        counts += np.bincount(drawn[-1], minlength=len(sizes))
    draws = np.concatenate(drawn)
    ends = [np.flatnonzero(draws == source)[size - 1] for source, size in enumerate(sizes) if counts[source] >= size]
    return draws[: (min if under else max)(ends) + 1]
