"""Which documents Megatron reads in which order, and where it cuts them into samples.

The documents of all epochs, shuffled (``document_index``), are one stream of tokens. Sample *i* is its tokens from
``i * sequence_length`` on; one more token is the target of its last position, and the first of the next sample::

    document_index        2       0     1
    stream                a b c d e f | g h i j k        sequence_length 4, 2 samples
    sample 0              ─────── t                      t: the last target
    sample 1                      ─────── t

``shuffle_index`` is the order in which samples are used. Where a sample begins (Megatron's ``sample_index``) is found
by binary search among the starts of the documents, so it is not stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from mindspeed_kernels._C.data import RandomState, accumulate_lengths, blend

_WORTH_MIXING = 0.8
"""A last epoch of which less than this part is asked for is shuffled by itself, behind the others."""


@dataclass(frozen=True)
class SampleOrder:
    """The samples of some epochs over a range of documents."""

    document_index: np.ndarray  # [epochs * documents] int32
    shuffle_index: np.ndarray  # [samples] int64
    starts: np.ndarray  # [epochs * documents + 1] int64: where each document begins in the stream, and its end
    sequence_length: int
    epochs: int

    def locate(self, sample: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where samples begin: position in ``document_index`` (of no empty document), and offset in the document."""
        token = np.asarray(sample) * np.int64(self.sequence_length)
        position = np.searchsorted(self.starts, token, side="right") - 1
        return position, token - self.starts[position]

    def save(self, folder: Path) -> None:
        """Write the order into a new folder, for ``load``."""
        folder.mkdir(parents=True)
        for name in ("document_index", "shuffle_index", "starts"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "order.json").write_text(json.dumps([self.sequence_length, self.epochs]))

    @classmethod
    def load(cls, folder: Path) -> SampleOrder:
        """A saved order, memory-mapped, so that all processes of a machine share it."""
        arrays = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("document_index", "shuffle_index", "starts")
        )
        return cls(*arrays, *json.loads((folder / "order.json").read_text()))

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, which is also the number of their targets where no document's end is left out."""
        return len(self.shuffle_index) * self.sequence_length


def build_order(
    lengths: np.ndarray, documents: range, *, sequence_length: int, seed: int | None, num_samples: int | None = None
) -> SampleOrder:
    """The order that Megatron gives to ``documents``, some of those with ``lengths``, which must not all be empty.

    There are as many epochs as ``num_samples`` need, or one, and all of their samples are in the result.
    ``seed`` is that of a NumPy ``RandomState``, whose shuffle the C++ class of that name has, for the documents and
    then for the samples; None: nothing is shuffled.
    """
    random = None if seed is None else RandomState(seed)
    tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))

    def samples_of(epochs: int) -> int:
        return max(epochs * tokens - 1, 0) // sequence_length

    epochs = 1 if num_samples is None else max(-(-(num_samples * sequence_length + 1) // tokens), 1)
    epoch_parts, sample_bounds = [epochs], [0, samples_of(epochs)]
    if num_samples is not None and epochs > 1:
        before_last = samples_of(epochs - 1)
        if num_samples - before_last < int(_WORTH_MIXING * samples_of(1)):
            epoch_parts, sample_bounds = [epochs - 1, 1], [0, before_last, samples_of(epochs)]

    one_epoch = np.arange(documents.start, documents.stop, dtype=np.int32)
    document_index = np.concatenate([_shuffle(np.tile(one_epoch, part), random) for part in epoch_parts])
    shuffle_index = np.concatenate([_shuffle(np.arange(*bounds), random) for bounds in pairwise(sample_bounds)])
    starts = accumulate_lengths(np.require(lengths, np.int32, ["C", "A"]), document_index)
    return SampleOrder(document_index, shuffle_index, starts, sequence_length, epochs)


def _shuffle(values: np.ndarray, random: RandomState | None) -> np.ndarray:
    if random is not None:
        random.shuffle(values)
    return values


def split_documents(count: int, weights: Sequence[float]) -> list[range]:
    """Cut ``count`` documents into consecutive ranges in proportion to ``weights``, rounded as Megatron rounds them."""
    shares = np.asarray(weights, np.float64)
    shares = shares / shares.sum()
    bounds = [0.0]
    for share in shares.tolist():
        bounds.append(bounds[-1] + share)
    return [range(round(begin * count), round(end * count)) for begin, end in pairwise(bounds)]


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1."""
    values = np.asarray(weights, np.float64)
    return (values / values.sum()).tolist()


def samples_of_each(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """How many samples each data set of a blend contributes to ``num_samples``, or should have with a ``surplus``."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def blend_by_weight(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Data set (int16) and sample in it (int64) of every sample of a blend, each as true to the weights as can be."""
    return blend(np.asarray(weights, np.float64), num_samples)


def blend_all(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same for a blend that has every sample of data sets of ``sizes`` samples once."""
    return blend(np.asarray(normalised(sizes)), sum(sizes), np.asarray(sizes, np.int64))
