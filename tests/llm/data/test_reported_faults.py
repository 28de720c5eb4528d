"""What users of other trainers reported and no other test of ours shows. Comments name the report."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.cache import prepare_once
from mindspeed_llm.data.collate import Collator
from mindspeed_llm.errors import DataError

from .conftest import Prepare, WriteRows, alpaca, trained_text

CHAT = [
    {"from": "human", "value": "Cold in A and B?"},
    {
        "from": "function_call",
        "value": '[{"name": "w", "arguments": {"t": "A"}}, {"name": "w", "arguments": {"t": "B"}}]',
    },
    {"from": "observation", "value": "1"},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "No."},
]


@pytest.mark.parametrize("template", ["chatml", "glm4", "gemma2"])
def test_packed_conversations_train_on_their_last_answers_only(
    template: str, prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    # LLaMA-Factory#10827: with mask_history earlier ends were still trained on, in packed rows too.
    rows = [alpaca("And?", f"last {i}", history=[["Hi", f"old {i}"], ["So?", f"older {i}"]]) for i in range(4)]
    entry = {"file_name": str(write_rows(rows)), "columns": {"history": "history"}}
    data = prepare(entry, template=template, mask_history=True, packing=True)
    assert len(data.train) == 1
    targets = Collator(0)([data.train[0]])["labels"][0].numpy()
    runs = int((np.diff((targets != -100).astype(int), prepend=0) > 0).sum())
    assert runs == 4
    text = trained_text(data.train[0], shared_tokenizer)
    assert [f"last {i}" in text for i in range(4)] == [True] * 4
    assert "old" not in text


def test_results_of_parallel_calls_are_no_broken_roles(prepare: Prepare, write_rows: WriteRows) -> None:
    # LLaMA-Factory#2962, #10178: two results in a row spoilt the conversation.
    path = write_rows([{"conversations": CHAT}])
    for template in ("qwen3", "llama3", "mistral", None):
        data = prepare({"file_name": str(path), "formatting": "sharegpt"}, template=template)
        assert (len(data.train), data.reports[0].skipped) == (1, 0)


def test_when_every_row_is_dropped_the_reason_is_told(prepare: Prepare, write_rows: WriteRows) -> None:
    # LLaMA-Factory#9600, #9618: "Cannot find valid samples", after a warning with an empty list.
    path = write_rows([{"conversations": CHAT[:size]} for size in (1, 3, 4)])
    with pytest.raises(DataError) as error:
        prepare({"file_name": str(path), "formatting": "sharegpt"}, template="chatml")
    assert f"none of 3 rows of {path} can be used" in str(error.value)
    assert "3 x the conversation does not end with an answer of the assistant" in str(error.value)
    assert f"{path}:1" in str(error.value)


@pytest.mark.parametrize("tools", ["", " ", "\n", "[]", None, []])
def test_blank_tools_reach_the_end_of_the_pipeline(tools: object, prepare: Prepare, write_rows: WriteRows) -> None:
    # LLaMA-Factory#7547: a blank in row 1000 of many ended the run with a traceback.
    path = write_rows([alpaca(tools=tools), alpaca(tools='[{"name": "w", "parameters": {}}]')])
    entry = {"file_name": str(path), "columns": {"tools": "tools"}}
    data = prepare(entry, template="qwen3")
    assert data.reports[0].skipped == 0
    assert len(data.train[1]["input_ids"]) > 2 * len(data.train[0]["input_ids"])


@pytest.mark.parametrize(("cutoff", "whole"), [(40, 0), (60, 0), (99, 0), (200, 1)])
def test_what_a_cutoff_costs_is_told(
    cutoff: int, whole: int, prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    # LLaMA-Factory#3995, #5820: answers lost their ends without a word.
    data = prepare(write_rows([alpaca("a " * 50, "b " * 50)]), template="chatml", cutoff_len=cutoff)
    row, report = data.train[0], data.reports[0]
    assert report.truncated == 1 - whole
    assert ("rows cut off at cutoff_len" in data.report) == (not whole)
    assert len(row["input_ids"]) <= cutoff
    assert (row["labels"] == 962).sum() == whole  # the end of the answer


@pytest.mark.parametrize("template", ["chatml", "default", "empty", None])
def test_an_answer_that_brings_its_end_has_one(
    template: str | None, prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([alpaca("Hi", "There<|im_end|>"), alpaca("Hi", "There")])
    data = prepare(path, template=template)
    assert data.train[0]["input_ids"].tolist() == data.train[1]["input_ids"].tolist()
    as_text = prepare(path, template="chatml", model={"split_special_tokens": True})
    assert shared_tokenizer.decode(as_text.train[0]["input_ids"]).count("There<|im_end|><|im_end|>") == 1


def test_a_text_that_brings_its_bounds_has_them_once(
    prepare: Prepare, write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.add_bos_token = True
    path = write_rows([{"text": "<|begin_of_text|>Hi<|im_end|>"}, {"text": "Hi"}])
    row = prepare(path, stage="pt", cutoff_len=64, tokenizer=tokenizer).train[0]
    first, second = np.split(row["input_ids"], np.cumsum(row["lengths"])[:-1])
    assert first.tolist() == second.tolist()
    assert [(second == token).sum() for token in (963, 962)] == [1, 1]


def test_a_leak_that_parity_asks_for_is_told(
    prepare: Prepare, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    prepare("own_alpaca", template="chatml", parity="llamafactory", neat_packing=True)
    assert not caplog.records
    prepare("own_alpaca", template="chatml", parity="llamafactory", packing=True)
    assert "the samples of a row see each other" in caplog.text


def _prepare_in(folder: Path) -> None:
    def prepare(target: Path) -> None:
        target.mkdir()
        time.sleep(0.2)
        (target / "rows").write_text("")

    assert (prepare_once(folder, "key", prepare) / "rows").exists()


def test_machines_without_a_shared_folder_prepare_their_own(tmp_path: Path) -> None:
    # Megatron-LM#907, #1355: only the first rank of all built the indices, which others did not find.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_prepare_in, args=(tmp_path / f"machine-{rank // 2}",)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert sorted(path.parent.name for path in tmp_path.glob("*/key")) == ["machine-0", "machine-1"]


def test_losses_of_each_evaluation_set_go_by_its_name(prepare: Prepare, write_rows: WriteRows, tmp_path: Path) -> None:
    # Names, order and sizes are those of the list, also with a single data set and with one that is trained on.
    for name, size in (("a", 3), ("b", 2), ("c", 1)):
        write_rows([alpaca(f"{name} {row}") for row in range(size)], f"{name}.jsonl")
    entries = {name: {"file_name": f"{name}.jsonl"} for name in "abc"}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    options = {"dataset_dir": str(tmp_path), "template": "chatml", "eval_on_each_dataset": True}
    data = prepare("a", eval_dataset="c, b,a", **options)
    assert [(name, len(rows)) for name, rows in data.eval.items()] == [("c", 1), ("b", 2), ("a", 3)]
    assert list(prepare("a", eval_dataset="b", **options).eval) == ["b"]
    together = prepare("a", eval_dataset="c,b,a", **options | {"eval_on_each_dataset": False})
    assert {name: len(rows) for name, rows in together.eval.items()} == {"eval": 6}
