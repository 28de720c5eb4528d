"""Blends, and what happens at the end of a document: as Megatron-core was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspeed_kernels._C.data import RandomState, accumulate_lengths, blend
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.config import Config
from mindspeed_llm.data.collate import Collator
from mindspeed_llm.data.factory import Data, DataFactory
from mindspeed_llm.data.megatron.gpt_dataset import BlendedDataset, GptDataset
from mindspeed_llm.data.megatron.indices import blend_all, blend_by_weight, normalised
from mindspeed_llm.errors import ConfigError, DataError

from ..conftest import ORACLES, make_config

RECORDED = ORACLES / "megatron"
BLENDS = sorted(path.stem for path in RECORDED.glob("blend_*.json"))
FORMS = ("reset_all", "reset_positions", "reset_positions_and_mask", "eod_mask_loss")

Build = Callable[..., Data]


def load(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.fixture
def build(tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase) -> Build:
    """``build(recorded config, other keys)``: our data with Megatron's settings under our names."""

    def run(theirs: dict[str, Any], **keys: Any) -> Data:
        paths = [str(RECORDED / corpus) for corpus in theirs["corpora"]]
        weighted = [item for pair in zip(theirs["weights"] or [], paths, strict=False) for item in pair]
        training = {"stage": "pt", "parity": "megatron", "seed": theirs["seed"], "per_device_train_batch_size": 1}
        if theirs["sizes"][0]:
            training["max_steps"] = theirs["sizes"][0]
        else:
            training["num_train_epochs"] = 1.0
        data = {
            "dataset": {"file_name": weighted or (paths if len(paths) > 1 else paths[0])},
            "data_manager_type": "mg",
            "cutoff_len": theirs["sequence_length"],
            "split": theirs["split"],
            **{key: theirs[key] for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")},
        }
        for key, value in keys.items():
            (training if key in Config.model_fields["training"].annotation.model_fields else data)[key] = value  # type: ignore[union-attr]
        return DataFactory(make_config(tmp_path / "out", data, training), shared_tokenizer).create()

    return run


@pytest.mark.parametrize("name", BLENDS)
def test_training_blends_are_megatron_s(name: str, build: Build) -> None:
    case = load(name)
    expected = case["splits"]["train"]
    rows = build(case["config"]).train
    assert isinstance(rows, BlendedDataset)
    assert rows.dataset_index.tolist() == expected["dataset_index"]
    assert rows.sample_index.tolist() == expected["dataset_sample_index"]
    for ours, theirs in zip(rows.datasets, expected["datasets"], strict=True):
        assert len(ours) == theirs["len"]
        assert ours.order.document_index.tolist() == theirs["document_index"]
        assert ours.order.shuffle_index.tolist() == theirs["shuffle_index"]
    for index, sample in enumerate(expected["samples"]):
        assert rows[index]["input_ids"].tolist() == sample["tokens"]
        assert rows[index]["labels"][1:].tolist() == sample["labels"]


def test_an_evaluation_blend_has_everything_once(build: Build) -> None:
    """As Megatron's of no given size."""
    case = load("blend_sizes")
    rows = build(case["config"]).eval["eval"]
    assert isinstance(rows, BlendedDataset)
    assert rows.dataset_index.tolist() == case["splits"]["valid"]["dataset_index"]
    assert rows.sample_index.tolist() == case["splits"]["valid"]["dataset_sample_index"]
    weighted = build(load("blend_weights")["config"]).eval["eval"]
    assert isinstance(weighted, BlendedDataset)
    assert len(weighted) == sum(map(len, weighted.datasets))


@pytest.mark.parametrize("name", FORMS)
def test_ends_of_documents_are_megatron_s(name: str, build: Build) -> None:
    case = load(name)
    data = build(case["config"])
    assert isinstance(data.train, GptDataset)
    batch = Collator(0, 8, data.quirks)([data.train[index] for index in range(4)])
    check_batch(batch, case)


def test_our_own_form_is_that_of_all_three_resets(build: Build) -> None:
    case = load("reset_all")
    data = build(case["config"], parity="none")
    assert isinstance(data.train, GptDataset)
    check_batch(Collator(0, 8, data.quirks)([data.train[index] for index in range(4)]), case)


def check_batch(batch: dict[str, Any], case: dict[str, Any]) -> None:
    samples = case["splits"]["train"]["samples"]
    assert any(0 in sample["loss_mask"] or 0 in sample["position_ids"][1:] for sample in samples)
    for row, sample in enumerate(samples):
        assert batch["input_ids"][row].tolist() == sample["tokens"]
        assert batch["position_ids"][row].tolist() == sample["position_ids"]
        labels = np.where(sample["loss_mask"], sample["labels"], -100)
        assert batch["labels"][row].tolist() == labels.tolist()
        if "attention_mask" in batch:  # all ones: causal, whatever the positions
            assert batch["attention_mask"][row].all()
            assert set(sample["attention_start"]) == {0}
        else:  # documents are told by their positions
            starts = np.maximum.accumulate(np.where(batch["position_ids"][row] == 0, np.arange(64), 0))
            assert starts.tolist() == sample["attention_start"]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 10), min_size=5, max_size=5),
    size=st.integers(0, 200),
)
@settings(max_examples=100, deadline=None)
def test_blends_follow_their_weights(sizes: list[int], weights: list[float], size: int) -> None:
    dataset, sample = blend_all(sizes)
    assert sorted(zip(dataset.tolist(), sample.tolist(), strict=True)) == [
        (index, number) for index, count in enumerate(sizes) for number in range(count)
    ]
    shares = normalised(weights)
    dataset, sample = blend_by_weight(shares, size)
    for index, share in enumerate(shares):
        own = sample[dataset == index]
        assert own.tolist() == list(range(len(own)))
        assert abs(len(own) - share * size) <= len(shares)


def test_a_blend_reports_what_it_takes_of_each(build: Build) -> None:
    config = load("blend_weights")["config"]
    for parity in ("none", "megatron"):
        data = build(config, parity=parity)
        [report, _] = data.reports
        assert report.rows == len(data.train) == 100
        assert report.tokens == 6400
        targets = sum(int((data.train[index]["labels"][1:] != -100).sum()) for index in range(100))
        assert report.targets == targets


@pytest.mark.parametrize("written", ["list", "mapping"])
def test_ways_to_write_a_blend(written: str, build: Build) -> None:
    case = load("blend_weights")
    paths = [str(RECORDED / corpus) for corpus in ("corpus_a", "corpus_b")]
    names = {"list": [0.3, paths[0], "7e-1", paths[1]], "mapping": dict(zip(paths, (0.3, 0.7), strict=True))}
    rows = build(case["config"], dataset={"file_name": names[written]}).train
    assert isinstance(rows, BlendedDataset)
    assert rows.dataset_index.tolist() == case["splits"]["train"]["dataset_index"]


def test_orders_are_kept_and_shared(build: Build, tmp_path: Path) -> None:
    config = load("single_seed1234_100")["config"]
    first, second = build(config), build(config)
    assert isinstance(second.train, GptDataset)
    assert isinstance(second.train.order.document_index, np.memmap)
    assert first.train[3]["input_ids"].tolist() == second.train[3]["input_ids"].tolist()
    folders = set((tmp_path / "out" / "prepared_data").glob("*/order.json"))
    build(config, seed=1)
    assert set((tmp_path / "out" / "prepared_data").glob("*/order.json")) > folders


def test_a_corpus_of_a_blend_that_is_missing(build: Build) -> None:
    config = load("blend_weights")["config"] | {"corpora": ["corpus_a", "corpus_x"], "split": "100,0,0"}
    with pytest.raises(ConfigError, match=r"corpus_x.idx|megatron needs the .bin"):
        build(config)
    with pytest.raises(ConfigError, match=r"a blend is made of .bin and .idx files; there is no .*corpus_x.idx"):
        build(config, parity="none")
    with pytest.raises(DataError, match="too few for one sample"):
        build(load("blend_sizes")["config"], cutoff_len=8000)


@given(size=st.integers(0, 300), seed=st.integers(0, 2**32 - 1), wide=st.booleans())
@settings(max_examples=100, deadline=None)
def test_shuffles_are_numpy_s(size: int, seed: int, wide: bool) -> None:
    ours = np.arange(size, dtype=np.int64 if wide else np.int32)
    theirs = ours.copy()
    state, expected = RandomState(seed), np.random.RandomState(seed)
    for _ in range(2):  # the second goes on where the first has left the generator
        state.shuffle(ours)
        expected.shuffle(theirs)
    assert np.array_equal(ours, theirs)


def test_shuffling_works_in_place_or_not_at_all() -> None:
    for values in (np.arange(4.0), np.arange(8)[::2], np.arange(4, dtype=np.int16)):
        with pytest.raises(TypeError):
            RandomState(0).shuffle(values)


def test_arithmetic_beyond_32_bits() -> None:
    lengths = np.full(5, 2**31 - 1, np.int32)
    order = np.arange(5, dtype=np.int32)[::-1].copy()
    assert accumulate_lengths(lengths, order).tolist() == [index * (2**31 - 1) for index in range(6)]


def test_what_cannot_be_ordered() -> None:
    with pytest.raises(ValueError, match="a weight, and with limits a limit"):
        blend(np.ones(2), 4, np.ones(3, np.int64))
    with pytest.raises(ValueError, match="do not add up to the size"):
        blend(np.ones(2), 4, np.ones(2, np.int64))
    with pytest.raises(ValueError, match="a weight is not finite"):
        blend(np.array([0.5, np.nan]), 4)
    lengths = np.ones(3, np.int32)
    for position in (3, -1):
        with pytest.raises(IndexError, match="the order has no such length"):
            accumulate_lengths(lengths, np.array([0, position], np.int32))
    with pytest.raises(TypeError):  # nothing is rounded or cut
        accumulate_lengths(lengths.astype(np.int64), np.zeros(1, np.int32))
    assert accumulate_lengths(lengths, np.zeros(0, np.int32)).tolist() == [0]
