"""What README.md shows is true: its configuration loads, its code runs, the files it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_llm.config import load_config
from tests.distributed import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_configuration_loads(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "qwen3-8b.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "train.jsonl").touch()
    model = REPOSITORY / "examples" / "quickstart" / "model"
    config = load_config(tmp_path / "qwen3-8b.yaml", [f"--model.model_name_or_path={model}"])
    assert config.training.resume_from_checkpoint == "auto"


def test_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    config = AutoConfig.from_pretrained(REPOSITORY / "examples" / "quickstart" / "model")
    names = {"x": torch.randn(4, 64), "weight": torch.ones(64), "model": AutoModelForCausalLM.from_config(config)}
    exec(code, names)
    torch.testing.assert_close(names["y"], torch.nn.functional.rms_norm(names["x"], [64], names["weight"], 1e-6))
    assert "Qwen3RMSNorm" in capsys.readouterr().out


def test_named_files_exist() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    proofs = [f"tests/{name}" for name in re.findall(r"`((?:llm|kernels|examples)/[\w./]*)`", README)]
    assert len(links) > 5
    assert len(proofs) > 10
    assert [name for name in [*links, *proofs] if not (REPOSITORY / name).exists()] == []
