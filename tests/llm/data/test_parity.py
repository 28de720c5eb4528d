"""By how much LLaMA-Factory's rows differ from ours, quirk by quirk, on the recorded data.

What `training.parity: llamafactory` counts is its own, as `test_oracles.py` shows; docs/parity.md lists the quirks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.collate import Collator
from mindspeed_llm.data.factory import Data

from .conftest import Prepare, WriteRows, alpaca

ROOT = Path(__file__).parents[3]


class Count(NamedTuple):
    rows: int
    tokens: int
    targets: int


def count(data: Data) -> Count:
    report = data.reports[0]
    return Count(report.rows, report.tokens, report.targets)


def both(prepare: Prepare, dataset: Any, **keys: Any) -> tuple[Data, Data]:
    """Our data, and LLaMA-Factory's."""
    return prepare(dataset, **keys), prepare(dataset, parity="llamafactory", **keys)


def texts(data: Data, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(tokenizer.decode(data.train[index]["input_ids"])) for index in range(len(data.train))]


def test_pretraining_loses_the_rest_of_every_thousand_rows(prepare: Prepare) -> None:
    """Of 8610 tokens the last 34; with chunks of 50 rows 290. Ours has all, and no target across two texts."""
    ours, theirs = both(prepare, "own_text", stage="pt", cutoff_len=128)
    assert (count(ours).tokens, count(theirs).tokens) == (8610, 67 * 128) == (8610, 8576)
    _, theirs = both(prepare, "own_text", stage="pt", cutoff_len=128, preprocessing_batch_size=50)
    assert count(theirs).tokens == 65 * 128 == 8320
    pieces = sum(len(ours.train[index]["lengths"]) for index in range(len(ours.train)))
    assert count(ours).targets == 8610 - pieces
    assert all(len(theirs.train[index]["lengths"]) == 1 for index in range(len(theirs.train)))


def test_openai_rows_without_tools_get_a_system_prompt(
    prepare: Prepare, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    ours, theirs = (
        texts(data, shared_tokenizer) for data in both(prepare, "own_openai", template="qwen3", cutoff_len=2048)
    )
    assert sum("detailed thinking off" in text for text in theirs) == 15
    assert not any("detailed thinking off" in text for text in ours)


def test_the_arguments_of_openai_calls_stay_a_quoted_text(
    prepare: Prepare, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    ours, theirs = (
        texts(data, shared_tokenizer) for data in both(prepare, "own_openai", template="qwen3", cutoff_len=2048)
    )
    quoted, written = re.compile(r'"arguments": "\{\\"'), re.compile(r'"arguments": \{"')
    assert [len(quoted.findall(text)) for text in theirs] == [len(written.findall(text)) for text in ours]
    assert sum(len(written.findall(text)) for text in ours) == 5
    assert not any(quoted.search(text) for text in ours)


def test_the_text_beside_an_openai_call_is_dropped(
    prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Brem"}}}
    messages = [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
    ]
    entry = {"file_name": str(write_rows([{"messages": messages}])), "formatting": "openai"}
    ours, theirs = (texts(data, shared_tokenizer)[0] for data in both(prepare, entry, template="chatml"))
    assert "assistant\nLet me look.\nAction: weather" in ours
    assert "assistant\nAction: weather" in theirs


def test_objects_are_filled_with_the_keys_of_all_others(
    prepare: Prepare, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A fifth more tokens in five rows, and half again as many targets."""
    ours, theirs = both(prepare, "own_openai_objects", template="qwen3", cutoff_len=2048)
    assert (count(ours).tokens, count(theirs).tokens) == (2027, 2468)
    assert (count(ours).targets, count(theirs).targets) == (300, 439)
    nulls = [sum(text.count(": null") for text in texts(data, shared_tokenizer)) for data in (ours, theirs)]
    assert nulls[0] == 0 < nulls[1]


def test_an_answer_that_brings_its_end_token_gets_a_second_one(prepare: Prepare, write_rows: WriteRows) -> None:
    path = write_rows([alpaca("Hi", "There<|im_end|>")])
    ours, theirs = both(prepare, path, template="chatml")
    assert [int((data.train[0]["labels"] == 962).sum()) for data in (ours, theirs)] == [1, 2]


def test_rows_with_an_empty_answer_are_trained_on(prepare: Prepare) -> None:
    """One of 79: 23 tokens, of which 8 are targets (an empty thought and the end)."""
    ours, theirs = both(prepare, "own_alpaca", template="qwen3")
    assert (count(ours).rows, count(theirs).rows) == (78, 79)
    assert count(theirs).tokens - count(ours).tokens == 23
    assert count(theirs).targets - count(ours).targets == 8


def test_two_messages_of_one_role_drop_the_row(prepare: Prepare, write_rows: WriteRows) -> None:
    turns = [("human", "Hi"), ("human", "there"), ("gpt", "Hello")]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in part]} for part in (turns, turns[1:])]
    ours, theirs = both(prepare, {"file_name": str(write_rows(rows)), "formatting": "sharegpt"}, template="chatml")
    assert [(len(data.train), data.reports[0].skipped) for data in (ours, theirs)] == [(2, 0), (1, 1)]


@pytest.mark.parametrize(("template", "tokens"), [("glm4", 1437), ("gemma2", 1518)])
def test_masked_history_still_trains_the_ends_of_answers(template: str, tokens: int, prepare: Prepare) -> None:
    """A target for each of the 59 answers that are history, where the last one ends with the next turn's beginning."""
    keys = {"template": template, "mask_history": True, "cutoff_len": 2048}
    ours, theirs = both(prepare, "own_sharegpt", **keys)
    assert count(ours).tokens == count(theirs).tokens
    assert (count(ours).targets, count(theirs).targets) == (tokens, tokens + 59)
    no_difference = [count(data) for data in both(prepare, "own_sharegpt", **keys | {"template": "chatml"})]
    assert no_difference[0] == no_difference[1]


def test_packed_rows_keep_a_token_free_are_padded_and_train_across_documents(
    prepare: Prepare, write_rows: WriteRows
) -> None:
    """Two samples that fill a row of ours take two of theirs, each padded to the full length."""
    path = write_rows([alpaca("a " * 20, "b " * 20), alpaca("c " * 20, "d " * 20)])
    keys = {"template": "chatml", "packing": True, "train_on_prompt": True}
    length = count(prepare(path, cutoff_len=1000, **keys)).tokens
    ours, theirs = both(prepare, path, cutoff_len=length, **keys)
    assert (len(ours.train), len(theirs.train)) == (1, 2)
    batch = Collator(0, 1, theirs.quirks)([theirs.train[0]])
    assert batch["input_ids"].shape == (1, length)
    assert Collator(0, 1)([ours.train[0]])["input_ids"].shape == (1, length)
    ours, theirs = both(prepare, path, cutoff_len=length + 1, **keys)
    targets = [(Collator(0, 1, data.quirks)([data.train[0]])["labels"] != -100).sum().item() for data in (ours, theirs)]
    assert targets == [length - 2, length - 1]  # the last token of the first sample predicts the first of the second


def test_labels_are_counted_before_the_shift(prepare: Prepare) -> None:
    """With ``train_on_prompt`` the divisor is larger by one for each row, the loss smaller by 79 in 9389."""
    theirs = prepare("own_alpaca", template="qwen3", train_on_prompt=True, parity="llamafactory")
    batch = Collator(0)([theirs.train[index] for index in range(len(theirs.train))])
    targets = int((batch["labels"] != -100).sum())
    assert len(theirs.train) == 79
    assert (batch.num_unshifted_labels, targets) == (9389, 9389 - 79)
    assert targets == count(theirs).targets
    rows = prepare("own_alpaca", template="qwen3").train
    answers_only = Collator(0)([rows[index] for index in range(len(rows))])
    assert answers_only.num_unshifted_labels == int((answers_only["labels"] != -100).sum())


def _rows_of_the_page() -> list[list[str]]:
    lines = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and not line.startswith("| what")]


@pytest.mark.parametrize("cells", _rows_of_the_page(), ids=lambda cells: cells[0][:40])
def test_every_quirk_names_a_test_that_is_there(cells: list[str]) -> None:
    """The last column of docs/parity.md: `file`: `test`, below tests/llm."""
    found = re.fullmatch(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", cells[-1])
    assert found, cells
    content = (ROOT / "tests" / "llm" / found[1]).read_text(encoding="utf-8")
    for name in re.findall(r"`(test_\w+)`", found[2]):
        assert f"def {name}(" in content, name
