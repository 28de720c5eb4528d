"""Rows of an indexed data set: what each position sees and predicts, up to the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.collate import Batch, Collator
from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.data.megatron.gpt_dataset import GptDataset, OneText
from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.data.megatron.indices import build_order
from tests.llm.data.megatron.writing import write_indexed

DOCUMENTS = [[11, 12, 13], [21, 22], [], [31, 32, 33, 34, 35, 36, 37]]  # 11 12 13 21 | 22 31 32 33 | 34 35 36 37


def dataset(folder: Path, documents: list[list[int]], sequence_length: int, *, leak: bool = False) -> GptDataset:
    tokens = IndexedTokens(write_indexed(folder / "corpus", documents))
    order = build_order(tokens.lengths, range(len(tokens)), sequence_length=sequence_length, seed=None)
    return GptDataset(tokens, order, OneText(-1) if leak else None)


def batch(rows: GptDataset) -> Batch:
    return Collator(pad_token_id=0, pad_to_multiple=1)([rows[index] for index in range(len(rows))])


def test_documents_are_apart(tmp_path: Path) -> None:
    """Positions restart; an end predicts nothing, and a document cut by a row's end still predicts what follows."""
    rows = batch(dataset(tmp_path, DOCUMENTS, 3))
    assert rows["input_ids"].tolist() == [[11, 12, 13], [21, 22, 31], [32, 33, 34]]
    assert rows["labels"].tolist() == [[12, 13, IGNORE_INDEX], [22, IGNORE_INDEX, 32], [33, 34, 35]]
    assert rows["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0], [0, 1, 2]]
    assert "attention_mask" not in rows


def test_in_megatron_s_form_a_sample_is_one_text(tmp_path: Path) -> None:
    rows = batch(dataset(tmp_path, DOCUMENTS, 3, leak=True))
    assert rows["input_ids"].tolist() == [[11, 12, 13], [21, 22, 31], [32, 33, 34]]
    assert rows["labels"].tolist() == [[12, 13, 21], [22, 31, 32], [33, 34, 35]]
    assert rows["position_ids"].tolist() == [[0, 1, 2]] * 3
    assert "attention_mask" not in rows


@pytest.mark.parametrize("leak", [False, True])
def test_padding_behind_a_sample_is_no_target(leak: bool, tmp_path: Path) -> None:
    rows = dataset(tmp_path, DOCUMENTS, 3, leak=leak)
    padded = Collator(pad_token_id=0, pad_to_multiple=8)([rows[1]])
    assert padded["input_ids"].tolist() == [[21, 22, 31, 0, 0, 0, 0, 0]]
    assert padded["labels"].tolist() == [[22, 31 if leak else IGNORE_INDEX, 32, *[IGNORE_INDEX] * 5]]
    assert padded.num_tokens == 3


def test_beyond_the_last_sample(tmp_path: Path) -> None:
    rows = dataset(tmp_path, DOCUMENTS, 3)
    assert len(rows) == 3
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"sample {index} of 3"):
            rows[index]


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 9),
    sequence_length=st.integers(1, 9),
    leak=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_token_is_a_target_once(
    lengths: list[int], sequence_length: int, leak: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Token t of document d is d * 10 + t: each follows its predecessor, and the report counts the same targets."""
    documents = [[d * 10 + t for t in range(length)] for d, length in enumerate(lengths)]
    rows = dataset(tmp_path_factory.mktemp("rows"), documents, sequence_length, leak=leak)
    got = batch(rows)
    inputs, targets = (got[name].numpy().ravel() for name in ("input_ids", "labels"))
    counted = targets != IGNORE_INDEX
    stream = np.concatenate([np.asarray(document, np.int64) for document in documents])
    assert inputs.tolist() == stream[: len(inputs)].tolist()
    expected = stream[1 : len(inputs) + 1]
    starts_document = expected % 10 == 0
    assert targets[counted].tolist() == expected[counted].tolist()
    assert counted.tolist() == ([True] * len(expected) if leak else (~starts_document).tolist())
    report = rows.report("train")
    assert (report.targets, report.tokens, report.rows) == (counted.sum(), len(inputs), len(rows))
