"""Configurations, files and the tokenizer that the data tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mindspeed_llm.config import Config
from mindspeed_llm.data.factory import Data, DataFactory

ORACLES = Path(__file__).parents[2] / "data" / "oracles"
TODAY = date(2025, 1, 15)

Prepare = Callable[..., Data]
WriteRows = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ORACLES / "tokenizer")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of the test's own, which it may change."""
    return AutoTokenizer.from_pretrained(ORACLES / "tokenizer")


def make_config(output_dir: Path, data: Mapping[str, Any], training: Mapping[str, Any], **model: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"model_name_or_path": str(ORACLES / "tokenizer"), **model},
            "data": {"dataset_dir": str(ORACLES / "data"), **data},
            "training": {"output_dir": str(output_dir), **training},
        }
    )


@pytest.fixture
def prepare(tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase) -> Prepare:
    """``prepare(dataset, stage=..., parity=..., tokenizer=..., **data keys)``: the data of a run."""

    def run(
        dataset: str | Path | Mapping[str, Any],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stage: str = "sft",
        parity: str = "none",
        model: Mapping[str, Any] | None = None,
        **data: Any,
    ) -> Data:
        if isinstance(dataset, Path):
            dataset = {"file_name": str(dataset)}
        config = make_config(
            tmp_path / "out", {"dataset": dataset, **data}, {"stage": stage, "parity": parity}, **(model or {})
        )
        return DataFactory(config, tokenizer or shared_tokenizer, today=TODAY).create()

    return run


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """``write_rows([...], name="rows.jsonl")``: a file of JSON lines; texts are written as they are."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def alpaca(question: str = "What?", answer: str = "That.", **columns: Any) -> dict[str, Any]:
    return {"instruction": question, "input": "", "output": answer, **columns}


def trained_text(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """What a row is trained on, as text."""
    return str(tokenizer.decode(row["labels"][row["labels"] != -100]))
