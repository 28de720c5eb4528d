"""From a configuration to rows: splits, packing, pretraining, bad rows, and preparing once for everybody."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.cache import prepare_once
from mindspeed_llm.data.factory import Data, DataFactory
from mindspeed_llm.data.render import render_sample
from mindspeed_llm.data.store import TokenRows
from mindspeed_llm.errors import DataError

from .conftest import TODAY, Prepare, WriteRows, alpaca, make_config, trained_text

BOTH = "own_alpaca,own_sharegpt"


def ids(rows: TokenRows) -> list[list[int]]:
    return [rows[index]["input_ids"].tolist() for index in range(len(rows))]


def test_defaults_differ_from_llamafactory_in_what_it_should_not_do(prepare: Prepare) -> None:
    """The same rows but for one whose answer is empty, which it trains on."""
    ours, theirs = prepare(BOTH, template="chatml"), prepare(BOTH, template="chatml", parity="llamafactory")
    assert (len(ours.train), len(theirs.train)) == (136, 137)
    assert [row for row in ids(theirs.train) if row not in ids(ours.train)] == [ids(theirs.train)[11]]
    assert "alpaca.json: row 12: an answer is empty" in ours.report


def test_val_size_is_split_as_llamafactory_does(prepare: Prepare) -> None:
    everything = prepare("own_alpaca", template="qwen3", parity="llamafactory")
    order = np.random.default_rng(42).permutation(79)
    for val_size, count in ((0.1, 8), (5, 5)):
        data = prepare("own_alpaca", template="qwen3", parity="llamafactory", val_size=val_size)
        expected = [ids(everything.train)[index] for index in order]
        assert ids(data.eval["eval"]) == expected[:count]
        assert ids(data.train) == expected[count:]


def test_val_size_that_leaves_nothing(prepare: Prepare) -> None:
    with pytest.raises(DataError, match="val_size: 79 leaves nothing of 79 rows to train on"):
        prepare("own_alpaca", template="qwen3", val_size=79)


def test_evaluation_data_has_the_masks_of_training_data(prepare: Prepare) -> None:
    # LLaMA-Factory#5165: mask_history did not reach the evaluation data.
    data = prepare("own_sharegpt", eval_dataset="own_sharegpt", template="qwen3", mask_history=True)
    for index in range(len(data.train)):
        assert np.array_equal(data.eval["eval"][index]["labels"], data.train[index]["labels"])


def test_evaluation_on_each_data_set(prepare: Prepare) -> None:
    data = prepare("own_alpaca", eval_dataset=BOTH, eval_on_each_dataset=True, template="qwen3")
    assert {name: len(rows) for name, rows in data.eval.items()} == {"own_alpaca": 78, "own_sharegpt": 58}
    assert "data own_sharegpt: 60 rows read -> 58 rows" in data.report


@pytest.mark.parametrize("key", ["packing", "neat_packing"])
def test_packed_rows_hold_the_same_documents(key: str, prepare: Prepare) -> None:
    plain, packed = (
        prepare(BOTH, template="qwen3", cutoff_len=256),
        prepare(BOTH, template="qwen3", cutoff_len=256, **{key: True}),
    )
    documents = []
    for index in range(len(packed.train)):
        row = packed.train[index]
        assert len(row["input_ids"]) == row["lengths"].sum() <= 256
        documents += [part.tolist() for part in np.split(row["input_ids"], np.cumsum(row["lengths"])[:-1])]
    assert sorted(documents) == sorted(ids(plain.train))
    assert len(packed.train) < len(plain.train) / 2
    assert packed.quirks is None
    assert plain.reports[0].targets == packed.reports[0].targets


def test_every_packed_document_keeps_its_end(prepare: Prepare, write_rows: WriteRows) -> None:
    # LLaMA-Factory#5599, #2761: models that never stop, as nothing in a pack taught them to.
    data = prepare(write_rows([alpaca("Hi", "There"), alpaca("Bye", "Then")]), template="chatml", packing=True)
    assert len(data.train) == 1
    assert (data.train[0]["labels"] == 962).sum() == 2


def test_pretraining_text(prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows are full but for the last, nothing is lost, and every text ends with eos and stands for itself."""
    # LLaMA-Factory#8903, torchtitan#2560: texts packed for pretraining saw each other, positions ran on.
    texts = ["one two three " * 9, "四五六", "seven " * 30]
    data = prepare(write_rows([{"text": text} for text in texts]), stage="pt", cutoff_len=20)
    rows = [data.train[index] for index in range(len(data.train))]
    assert {len(row["input_ids"]) for row in rows[:-1]} == {20}
    stream = [token for row in rows for token in row["input_ids"].tolist()]
    assert shared_tokenizer.decode(stream) == "".join(f"{text}<|im_end|>" for text in texts)
    ends = {int(end) - 1 for end in np.cumsum([length for row in rows for length in row["lengths"]])}
    eos = {position for position, token in enumerate(stream) if token == 962}
    assert len(eos) == 3
    assert eos <= ends
    assert all(row["labels"] is row["input_ids"] or (row["labels"] == row["input_ids"]).all() for row in rows)
    assert data.reports[0].targets == len(stream) - sum(len(row["lengths"]) for row in rows)


@pytest.mark.parametrize("name", ["text.txt", "text.parquet"])
def test_pretraining_from_other_files(
    name: str, prepare: Prepare, write_rows: WriteRows, tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    if name.endswith(".txt"):
        path = write_rows(["Once upon a time", "", "there was text."], name=name)
    else:
        path = tmp_path / name
        pq.write_table(pa.table({"text": ["Once upon a time", "there was text."], "id": [1, 2]}), path)
    data = prepare(path, stage="pt", cutoff_len=64)
    assert shared_tokenizer.decode(data.train[0]["input_ids"]) == "Once upon a time<|im_end|>there was text.<|im_end|>"
    assert len(data.train[0]["lengths"]) == 2


def test_pretraining_with_a_tokenizer_that_adds_bos(
    prepare: Prepare, write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"text": "Hi"}, {"text": "Ho"}])
    tokenizer.add_bos_token = True
    data = prepare(path, stage="pt", cutoff_len=64, tokenizer=tokenizer)
    assert (data.train[0]["input_ids"] == 963).sum() == 2
    assert data.train[0]["input_ids"][0] == 963


def test_pretraining_rows_that_cannot_be_used(prepare: Prepare, write_rows: WriteRows) -> None:
    path = write_rows([{"text": "Hi"}, {"text": ""}, {"content": "Ho"}, {"text": 3}])
    report = prepare(path, stage="pt").report
    assert f"{path}:2: column 'text' is blank" in report
    assert f"{path}:3: no column 'text'; the row has 'content'" in report
    assert f"{path}:4: column 'text' is not text but int" in report


def test_bad_rows_are_skipped_counted_and_named(prepare: Prepare, write_rows: WriteRows) -> None:
    path = write_rows([alpaca(), "{broken", alpaca("Hi", ""), alpaca(), {"instruction": "Hi"}])
    data = prepare(path, template="chatml")
    assert len(data.train) == 2
    assert data.reports[0].skipped == 3
    assert "data train: 5 rows read -> 2 rows" in data.report
    assert "3 rows skipped because they cannot be used" in data.report
    assert f"{path}:2: not JSON" in data.report
    assert f"{path}:3: an answer is empty" in data.report
    assert f"{path}:5: no column 'output'; the row has 'instruction'" in data.report


def test_max_bad_rows(prepare: Prepare, write_rows: WriteRows) -> None:
    path = write_rows([alpaca(), "{broken", alpaca("Hi", "")])
    assert len(prepare(path, template="chatml", max_bad_rows=2).train) == 1
    with pytest.raises(DataError, match=r"more than data.max_bad_rows = 1 rows cannot be used:") as error:
        prepare(path, template="chatml", max_bad_rows=1)
    assert f"{path}:2: not JSON" in str(error.value)
    assert not list(path.parent.rglob(".*-*"))  # nothing half done is left


def test_no_usable_row_at_all_says_why(prepare: Prepare, write_rows: WriteRows) -> None:
    # LLaMA-Factory#4236: all rows dropped, and nothing but their number told.
    path = write_rows([{"question": "Hi", "answer": "Ho"}] * 3)
    with pytest.raises(DataError) as error:
        prepare(path, template="chatml")
    assert f"none of 3 rows of {path} can be used" in str(error.value)
    assert "3 x no column 'instruction'; the row has 'question', 'answer'" in str(error.value)
    assert f"{path}:1: no column 'instruction'" in str(error.value)


@pytest.mark.parametrize(
    ("stage", "template", "end"),
    [
        ("sft", "mistral", "<|im_end|>"),  # a template without a token of its own: the tokenizer's
        ("sft", None, "<|im_end|>"),
        ("sft", "gemma", "<end_of_turn>"),
        ("pt", None, None),
    ],
)
def test_where_answers_end(
    stage: str, template: str | None, end: str | None, tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer = copy.deepcopy(shared_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    config = make_config(tmp_path / "out", {"dataset": "own_alpaca", "template": template}, {"stage": stage})
    expected = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert DataFactory(config, tokenizer).end_of_answers == expected


@pytest.mark.parametrize("cutoff_len", [8, 512])
def test_a_warning_when_every_row_is_cut_short(
    prepare: Prepare, caplog: pytest.LogCaptureFixture, cutoff_len: int
) -> None:
    prepare("own_alpaca", template="chatml", cutoff_len=cutoff_len)
    assert ("data.cutoff_len 8 cuts every row short" in caplog.text) == (cutoff_len == 8)


@pytest.mark.parametrize("content", ["", "[]"])
def test_an_empty_file_says_so(prepare: Prepare, tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(
        DataError, match=f"none of 0 rows of {path} can be used:\n  the files of the data set are empty"
    ):
        prepare(path, template="chatml")


def test_columns_that_nothing_reads_are_named(prepare: Prepare, write_rows: WriteRows) -> None:
    report = prepare(write_rows([alpaca(system="Be kind.", history=[])]), template="chatml").report
    assert "columns not used: system, history" in report


def test_processes_and_chunks_do_not_change_the_rows(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is prepared in this process, before the others are started and while they start."""
    one = prepare(BOTH, template="qwen3")
    monkeypatch.setattr("mindspeed_llm.data.prepare._ALONE", -1.0)
    two = prepare(BOTH, template="qwen3", preprocessing_num_workers=2, preprocessing_batch_size=10)
    assert ids(one.train) == ids(two.train)
    assert one.reports == two.reports


def test_rows_are_reused_only_while_nothing_changes(
    tmp_path: Path, write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows([alpaca("Hi", "There"), alpaca("Bye", "Then")])
    store = tmp_path / "store"

    def run(*, stage: str = "sft", split_special_tokens: bool = False, **data: Any) -> Data:
        data = {"dataset": {"file_name": str(path)}, "template": "qwen3", "tokenized_path": str(store), **data}
        config = make_config(tmp_path / "out", data, {"stage": stage}, split_special_tokens=split_special_tokens)
        return DataFactory(config, tokenizer, today=TODAY).create()

    def entries() -> int:
        return len([entry for entry in store.iterdir() if entry.is_dir()])

    first = run()
    assert entries() == 1
    assert run(preprocessing_num_workers=1).reports == first.reports
    assert entries() == 1
    run(template="chatml")
    run(cutoff_len=8)
    run(enable_thinking=False)
    run(split_special_tokens=True)
    assert entries() == 5
    path.write_text(path.read_text(encoding="utf-8").replace("There", "Here!"), encoding="utf-8")
    changed = run()
    assert "Here!" in trained_text(changed.train[0], tokenizer)
    tokenizer.add_tokens(["Here!"])
    assert len(run().train[0]["input_ids"]) < len(changed.train[0]["input_ids"])
    assert entries() == 7
    monkeypatch.setattr("mindspeed_llm.data.factory.code_fingerprint", lambda: "another version of the package")
    run()
    assert entries() == 8


def test_progress_is_told(prepare: Prepare, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    caplog.set_level(logging.INFO)
    seconds = itertools.count(step=3)
    monkeypatch.setattr("mindspeed_llm.data.prepare.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    prepare("own_alpaca", template="chatml", preprocessing_batch_size=10)
    told = [record.getMessage() for record in caplog.records if "rows prepared" in record.getMessage()]
    assert told[0].endswith(" of 79 rows prepared")
    assert 1 < len(told) < 8


def test_the_date_counts_where_it_is_written(tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    def text(template: str, day: int) -> str:
        data = {"dataset": "own_sharegpt", "template": template}
        today = TODAY.replace(day=day)
        rows = DataFactory(make_config(tmp_path, data, {}), shared_tokenizer, today=today).create().train
        return str(shared_tokenizer.decode(rows[2]["input_ids"]))

    assert "Today Date: 15 Jan 2025" in text("llama3", 15)
    assert "Today Date: 16 Jan 2025" in text("llama3", 16)
    assert text("qwen3", 15) == text("qwen3", 16)
    assert len(list((tmp_path / "prepared_data").glob("*.lock"))) == 3


def _prepare_slowly(folder: Path, log: Path, seconds: float) -> None:
    def prepare(target: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        target.mkdir()
        (target / "half").write_text("")
        time.sleep(seconds)
        (target / "done").write_text("")

    assert (prepare_once(folder, "key", prepare) / "done").exists()


def test_one_process_prepares_and_the_others_wait(tmp_path: Path) -> None:
    # LLaMA-Factory#2424, MiniCPM-V#914: ranks that waited in a collective timed out.
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    ranks = [context.Process(target=_prepare_slowly, args=(tmp_path / "x", log, 0.5)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len(log.read_text().splitlines()) == 1


def test_another_process_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    first = context.Process(target=_prepare_slowly, args=(tmp_path / "x", log, 60))
    first.start()
    while not log.exists() or not list((tmp_path / "x").glob(".key-*/half")):
        time.sleep(0.01)
    second = context.Process(target=_prepare_slowly, args=(tmp_path / "x", log, 0))
    second.start()
    time.sleep(0.2)
    assert second.is_alive()  # waits
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second.join(30)
    assert second.exitcode == 0
    assert len(log.read_text().splitlines()) == 2


def test_first_sample_shows_what_is_trained(
    prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = prepare(write_rows([alpaca("Hi", "There"), alpaca("Ho", "Then")]), template="chatml", packing=True).train
    text = render_sample(rows[0], shared_tokenizer)
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[There<|im_end|>\n]]" in text
    assert "--- next document ---" in text
    assert f"input_ids: {rows[0]['input_ids'].tolist()}" in text
    assert f"labels:    {rows[0]['labels'].tolist()}" in text
    short = render_sample(rows[0], shared_tokenizer, max_tokens=5)
    assert f"first sample, {len(rows[0]['input_ids'])} tokens (cut for display)" in short
    assert f"input_ids: {rows[0]['input_ids'][:5].tolist()}" in short


def test_reports_survive_being_stored(prepare: Prepare) -> None:
    first = prepare("own_sharegpt", template="qwen3")
    again = prepare("own_sharegpt", template="qwen3")
    assert first.reports == again.reports
    assert json.loads((again.train.folder / "report.json").read_text())["rows"] == 58
