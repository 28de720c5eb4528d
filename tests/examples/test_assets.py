"""The quickstart's committed files are what its script makes, and its held-out questions are held out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.distributed import REPOSITORY

QUICKSTART = REPOSITORY / "examples" / "quickstart"
ASSETS = [
    "train.jsonl",
    "held_out.jsonl",
    "text.jsonl",
    "model/config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
]


def read_turns(name: str) -> list[tuple[str, str]]:
    """Every (question, answer) of a file of conversations."""
    turns = []
    for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines():
        texts = [message["value"] for message in json.loads(line)["conversations"]]
        turns += zip(texts[::2], texts[1::2], strict=True)
    return turns


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    subprocess.run([sys.executable, str(QUICKSTART / "make_assets.py"), str(folder)], check=True, timeout=60)
    return folder


@pytest.mark.parametrize("name", ASSETS)
def test_script_makes_the_committed_file(made: Path, name: str) -> None:
    assert (made / name).read_bytes() == (QUICKSTART / name).read_bytes()


def test_held_out_questions_are_new_and_their_answers_known() -> None:
    training, held_out = read_turns("train.jsonl"), read_turns("held_out.jsonl")
    assert len(held_out) > 200
    assert not {question for question, _ in held_out} & {question for question, _ in training}
    assert {answer for _, answer in held_out} <= {answer for _, answer in training}


def test_tokenizer_keeps_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    text = "Ünïcode 你好 👋\n\n  12 + 30\t<tag>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id]
