"""Orders of mixed data sets are those of ``datasets.interleave_datasets``; what cannot be mixed says so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.mixing import mixed_order
from mindspeed_llm.errors import DataError

from .conftest import ORACLES, Prepare, WriteRows, alpaca

RECORDED = json.loads((ORACLES / "mixing.json").read_text())["cases"]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['strategy']}-{case['sizes']}")
def test_orders_are_the_recorded_ones(case: dict[str, Any]) -> None:
    order = mixed_order(case["sizes"], case["strategy"], case["probabilities"], case["seed"])
    assert order.tolist() == case["order"]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    drawn=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_when_mixing_stops(sizes: list[int], seed: int, drawn: bool) -> None:
    """``under``: no row twice, and one data set whole. ``over``: every row, and some data set not twice begun."""
    probabilities = [1 / len(sizes)] * len(sizes) if drawn else None
    source = np.repeat(np.arange(len(sizes)), sizes)
    under = mixed_order(sizes, "interleave_under", probabilities, seed)
    assert len(set(under.tolist())) == len(under)
    assert any(Counter(source[under].tolist())[index] == size for index, size in enumerate(sizes))
    over = mixed_order(sizes, "interleave_over", probabilities, seed)
    assert set(over.tolist()) == set(range(sum(sizes)))
    assert (over[: len(under)] == under).all()
    for index, size in enumerate(sizes):  # within a data set rows keep their order
        own = over[source[over] == index] - sum(sizes[:index])
        assert own.tolist() == (np.arange(len(own)) % size).tolist()


def two_data_sets(write_rows: WriteRows, folder: Path, sizes: tuple[int, int] = (4, 2)) -> str:
    for name, size in zip("ab", sizes, strict=True):
        write_rows([alpaca(f"{name}{row}", f"{name}{row}") for row in range(size)], f"{name}.jsonl")
    entries = {name: {"file_name": f"{name}.jsonl"} for name in "ab"}
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return str(folder)


def test_a_run_mixes_its_data_sets(
    prepare: Prepare, write_rows: WriteRows, tmp_path: Path, shared_tokenizer: Any
) -> None:
    folder = two_data_sets(write_rows, tmp_path)

    def questions(**options: Any) -> list[str]:
        rows = prepare("a,b", dataset_dir=folder, template="empty", **options).train
        return [shared_tokenizer.decode(rows[index]["input_ids"])[:2] for index in range(len(rows))]

    assert questions() == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert questions(mix_strategy="interleave_under") == ["a0", "b0", "a1", "b1"]
    assert questions(mix_strategy="interleave_over") == ["a0", "b0", "a1", "b1", "a2", "b0", "a3", "b1"]
    drawn = questions(mix_strategy="interleave_over", interleave_probs=[0.8, 0.2])
    assert drawn == questions(mix_strategy="interleave_over", interleave_probs=[0.8, 0.2])
    assert set(drawn) == {"a0", "a1", "a2", "a3", "b0", "b1"}
    assert drawn != questions(mix_strategy="interleave_over", interleave_probs=[0.2, 0.8])  # and not those prepared
    # of every data set as many rows as asked for, then mixed; what is held out is held out of the mixture
    assert questions(mix_strategy="interleave_under", max_samples=1) == ["a0", "b0"]
    data = prepare("a,b", dataset_dir=folder, template="empty", mix_strategy="interleave_over", val_size=3)
    assert (len(data.train), len(data.eval["eval"])) == (5, 3)


def test_an_empty_data_set_cannot_be_mixed(prepare: Prepare, write_rows: WriteRows, tmp_path: Path) -> None:
    folder = two_data_sets(write_rows, tmp_path, (3, 0))
    assert len(prepare("a,b", dataset_dir=folder, template="empty").train) == 3
    with pytest.raises(DataError, match="mix_strategy: interleave_over: data set 'b' has no rows"):
        prepare("a,b", dataset_dir=folder, template="empty", mix_strategy="interleave_over")


def test_evaluation_data_is_mixed_likewise(prepare: Prepare, write_rows: WriteRows, tmp_path: Path) -> None:
    folder = two_data_sets(write_rows, tmp_path)
    options = {"dataset_dir": folder, "template": "empty", "mix_strategy": "interleave_under"}
    assert len(prepare("a", eval_dataset="a,b", **options).eval["eval"]) == 4
    each = prepare("a", eval_dataset="a,b", eval_on_each_dataset=True, **options).eval
    assert {name: len(rows) for name, rows in each.items()} == {"a": 4, "b": 2}
