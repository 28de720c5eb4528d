"""Token ids, labels, order and batches equal those that LLaMA-Factory was recorded with."""

from __future__ import annotations

import json
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.conversation import Conversation, Message, RowError
from mindspeed_llm.data.encode import EncodeOptions, TemplateEncoder
from mindspeed_llm.data.formats import parse_calls
from mindspeed_llm.data.loader import StepLoader
from mindspeed_llm.data.templates import Style, get_template
from mindspeed_llm.data.templates.builtin import BUILTIN
from mindspeed_llm.data.tokenise import Tokeniser

from .conftest import ORACLES, TODAY, Prepare

CASES = ("A_base", "B_packing", "C_neat_packing", "D_mask_history", "F_cutoff64", "H_openai_tools", "I_pt")
TEMPLATES = tuple(sorted(path.stem for path in (ORACLES / "cases" / "templates").glob("*.json")))


def load(name: str) -> dict[str, Any]:
    return json.loads((ORACLES / "cases" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_rows_and_batches(name: str, prepare: Prepare) -> None:
    case = load(name)
    keys = ("template", "cutoff_len", "packing", "neat_packing", "mask_history")
    settings = {key: case["config"][key] for key in keys if key in case["config"]}
    stage = case["config"]["stage"]
    data = prepare(case["config"]["dataset"], stage=stage, parity="llamafactory", **settings)
    assert len(data.train) == case["n_rows"]
    for index, expected in enumerate(case.get("rows", [])):
        row = data.train[index]
        padding = len(expected["input_ids"]) - len(row["input_ids"])  # it stores the padding of packed rows
        assert row["input_ids"].tolist() + [960] * padding == expected["input_ids"]
        if "labels" in expected:
            assert row["labels"].tolist() + [-100] * padding == expected["labels"]

    loader = StepLoader(
        data.train,
        batch_size=2,
        accumulation=2,
        seed=42,
        pad_token_id=960,
        pad_to_multiple=1 if stage == "pt" else 8,
        quirks=data.quirks,
    )
    recorded = iter(case["batches"])
    epochs = chain.from_iterable(repeat(loader))
    for step, window in enumerate(islice(epochs, 12)):
        assert len(window) == case["steps"][step]["micro_batches"]
        assert sum(batch.num_unshifted_labels for batch in window) == case["steps"][step]["num_items"]
        for batch, expected in zip(window, recorded, strict=False):
            check_batch(
                {key: value.numpy() for key, value in batch.items()}, expected, has_mask=name != "C_neat_packing"
            )
    assert next(recorded, None) is None


def check_batch(batch: dict[str, np.ndarray], expected: dict[str, Any], *, has_mask: bool) -> None:
    assert batch["input_ids"].tolist() == expected["input_ids"]
    labels = np.pad(np.array(expected["labels"])[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    assert batch["labels"].tolist() == labels.tolist()
    if "position_ids" in expected:
        assert batch["position_ids"].tolist() == expected["position_ids"]
    if has_mask and "attention_mask" in batch:
        assert batch["attention_mask"].tolist() == expected["attention_mask"]
    elif has_mask:  # left out where it says nothing
        assert np.all(np.array(expected["attention_mask"]) == 1)
    else:  # its block mask follows from the positions: a document begins wherever they restart
        assert "attention_mask" not in batch
        segments = np.array(expected["segment_ids"])
        begins = np.diff(segments, axis=1, prepend=0) > 0
        assert np.array_equal(begins, (batch["position_ids"] == 0) & (segments > 0))


@pytest.mark.parametrize("template", ["qwen3", "llama3"])
def test_objects_in_openai_rows(template: str, prepare: Prepare, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    """Its loader gives every call the arguments of all other calls, as null, and every schema all properties."""
    expected = json.loads((ORACLES / "openai_objects.json").read_text())["templates"][template]
    rows = prepare("own_openai_objects", template=template, parity="llamafactory", cutoff_len=2048).train
    assert [rows[index]["input_ids"].tolist() for index in range(len(rows))] == [row["input_ids"] for row in expected]
    assert [rows[index]["labels"].tolist() for index in range(len(rows))] == [row["labels"] for row in expected]
    assert '"商品": null' in shared_tokenizer.decode(rows[0]["input_ids"])

    ours = prepare("own_openai_objects", template=template, cutoff_len=2048).train
    assert len(ours) == len(rows)
    assert all("null" not in shared_tokenizer.decode(ours[index]["input_ids"]) for index in range(len(ours)))


def test_every_template_was_recorded() -> None:
    assert {template.name for template in BUILTIN} - {"kimi"} == set(TEMPLATES)  # of which it has the older one only


@pytest.mark.parametrize("name", TEMPLATES)
def test_template(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    recorded = load(f"templates/{name}")
    tokenizer.add_tokens(recorded.get("added_tokens", []), special_tokens=True)
    template = get_template(name)
    for case in recorded["cases"]:
        options = dict(case["options"])
        style = Style(
            enable_thinking=options.pop("enable_thinking", True),
            forget_thoughts=options.get("mask_history", False),
            today=TODAY,
            llamafactory=True,
        )
        settings = EncodeOptions(**{"cutoff_len": 2048, **options}, llamafactory=True, style=style)
        encode = TemplateEncoder(template, Tokeniser(tokenizer, eos=template.eos), settings)
        messages = tuple(map(message, recorded["conversations"][case["conversation"]]))
        tools = tuple(recorded["tools"]) if case["tools"] else ()
        encoded = encode([Conversation(messages, case["system"] or "", tools)])[0]
        if "error" in case:
            # It refuses glm4's parallel calls, as we do, and train_on_prompt with efficient_eos, which we can do.
            assert isinstance(encoded, RowError) == (case["conversation"] == "tools")
            continue
        assert not isinstance(encoded, RowError)
        [document] = encoded
        assert document.input_ids.tolist() == case["input_ids"], case["options"]
        assert document.labels.tolist() == case["labels"], case["options"]


def message(recorded: dict[str, str]) -> Message:
    if recorded["role"] == "function":
        return Message("assistant", *parse_calls(recorded["content"]))
    return Message("tool" if recorded["role"] == "observation" else recorded["role"], recorded["content"])  # type: ignore[arg-type]
