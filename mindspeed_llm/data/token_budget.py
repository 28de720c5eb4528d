"""Batches of as many rows as a number of tokens allows, padding counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_llm.errors import ConfigError


class TokenBudget:
    """Cuts rows of ``lengths`` tokens into batches of at most ``max_tokens`` once they are padded ::

        sorted widths    8 8 8 8 16 16 24     max_tokens 32
        batches          8 8 8 8|16 16|24

    Shuffled rows are sorted by their width, rows of the same width in the shuffled order, so that little is padded, and
    then the batches are shuffled. The sorted widths are the same in every order, and with them the cuts: each epoch has
    the same number of batches. Rows that are not shuffled are cut as they come.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int, pad_to_multiple: int, *, is_sorted: bool) -> None:
        self.widths = -(-lengths // pad_to_multiple) * pad_to_multiple
        widest = int(self.widths.max(initial=0))
        if widest > max_tokens:
            raise ConfigError(
                f"training.max_tokens_per_batch: {max_tokens} has no room for the longest row, which is padded to "
                f"{widest} tokens: raise it, or lower data.cutoff_len"
            )
        self.is_sorted = is_sorted
        self.ends = np.array(_cut(np.sort(self.widths) if is_sorted else self.widths, max_tokens), np.int64)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.ends)

    def order(self, rows: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """``rows`` in the order of their use, and where in it each batch ends."""
        if not self.is_sorted:
            return rows, self.ends
        rows = rows[np.argsort(self.widths[rows], kind="stable")]
        batches = np.split(rows, self.ends[:-1])
        shuffled = [batches[index] for index in random.permutation(len(batches))]
        return np.concatenate(shuffled), np.cumsum([len(batch) for batch in shuffled])


def _cut(widths: Sequence[int] | np.ndarray, max_tokens: int) -> list[int]:
    """Where each batch ends, every one as large as it can be."""
    ends: list[int] = []
    start = widest = 0
    for index, width in enumerate(map(int, widths)):
        widest = max(widest, width)
        if (index + 1 - start) * widest > max_tokens:
            ends.append(index)
            start, widest = index, width
    return [*ends, len(widths)] if len(widths) else []
