"""Order and cuts of samples: as Megatron-core was recorded, and as counting tokens one by one gives them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.megatron.gpt_dataset import GptDataset, OneText
from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.data.megatron.indices import build_order, split_documents

from ..conftest import ORACLES

RECORDED = ORACLES / "megatron"
CASES = sorted(path.stem for path in RECORDED.glob("single_*.json"))


def recorded_splits() -> list[Any]:
    """Name of the case, its configuration, position of the split, and what was recorded for it."""
    found = []
    for name in CASES:
        case = json.loads((RECORDED / f"{name}.json").read_text())
        for position, (split, expected) in enumerate(case["splits"].items()):
            if expected is not None:
                found.append(pytest.param(case["config"], position, expected, id=f"{name}-{split}"))
    return found


@pytest.mark.parametrize(("config", "position", "expected"), recorded_splits())
def test_indices_and_samples_are_megatron_s(config: dict, position: int, expected: dict) -> None:
    tokens = IndexedTokens(RECORDED / config["corpora"][0])
    documents = split_documents(len(tokens), [float(weight) for weight in config["split"].split(",")])[position]
    assert list(documents) == expected["documents"]
    order = build_order(
        tokens.lengths,
        documents,
        sequence_length=config["sequence_length"],
        seed=config["seed"],
        num_samples=config["sizes"][position],
    )
    assert order.document_index.tolist() == expected["document_index"]
    assert order.shuffle_index.tolist() == expected["shuffle_index"]
    begins = np.stack(order.locate(np.arange(len(order.shuffle_index) + 1)), axis=1)
    assert begins.tolist() == expected["sample_index"]

    dataset = GptDataset(tokens, order, OneText(962))
    assert len(dataset) == expected["len"]
    for row, sample in zip((dataset[i] for i in range(len(dataset))), expected["samples"], strict=False):
        assert row["input_ids"].tolist() == sample["tokens"]
        assert row["labels"][1:].tolist() == sample["labels"]
        assert row["lengths"].tolist() == [len(sample["position_ids"])] == [max(sample["position_ids"]) + 1]


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    sequence_length=st.integers(1, 9),
    num_samples=st.integers(1, 12),
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
@settings(max_examples=200, deadline=None)
def test_every_order(lengths: list[int], sequence_length: int, num_samples: int, seed: int | None) -> None:
    """Enough samples, each once, that are the stream of the documents cut from its beginning."""
    order = build_order(
        np.array(lengths), range(len(lengths)), sequence_length=sequence_length, seed=seed, num_samples=num_samples
    )
    samples = len(order.shuffle_index)
    assert samples >= num_samples
    assert (order.epochs == 1) or ((order.epochs - 1) * sum(lengths) < num_samples * sequence_length + 1)
    assert sorted(order.shuffle_index.tolist()) == list(range(samples))
    assert sorted(order.document_index.tolist()) == sorted(list(range(len(lengths))) * order.epochs)
    if seed is None:
        assert order.shuffle_index.tolist() == list(range(samples))
        assert order.document_index.tolist() == list(range(len(lengths))) * order.epochs
    stream = [(p, t) for p, document in enumerate(order.document_index) for t in range(lengths[document])]
    for sample in range(samples + 1):  # the last one is where the next would begin
        assert tuple(map(int, order.locate(sample))) == stream[sample * sequence_length]


def test_arithmetic_beyond_32_bits() -> None:
    """Six trillion tokens in documents of the largest size."""
    length = 2**31 - 1
    order = build_order(np.full(3000, length, np.int32), range(3000), sequence_length=2**24, seed=0, num_samples=None)
    last = len(order.shuffle_index) - 1
    assert last == (3000 * length - 1) // 2**24 - 1
    position, offset = map(int, order.locate(last))
    assert (position, offset) == divmod(last * 2**24, length)


@pytest.mark.parametrize("count", [1, 2, 7, 120, 600, 12345])
@pytest.mark.parametrize("weights", [(969, 30, 1), (100, 0, 0), (1, 1, 1), (0.5, 0.3, 0.2)])
def test_splits_cover_all_documents_in_order(count: int, weights: tuple[float, ...]) -> None:
    splits = split_documents(count, weights)
    assert [document for split in splits for document in split] == list(range(count))
    for split, weight in zip(splits, weights, strict=True):
        assert abs(len(split) - count * weight / sum(weights)) <= 1
