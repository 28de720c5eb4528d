"""A run whose data is streamed: on two ranks, and stopped and resumed, it trains on what one that goes through does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from tests.distributed import launch

ORACLES = Path(__file__).parent.parent / "data" / "oracles"


def configuration(output_dir: Path, stage: str, **training) -> Path:
    """Six steps over the recorded rows or texts."""
    data = {
        "sft": {"dataset": "own_alpaca,own_sharegpt", "template": "chatml", "mix_strategy": "interleave_over"},
        "pt": {"dataset": {"file_name": str(ORACLES / "data" / "text.jsonl")}},
    }
    options = {"stage": stage, "max_steps": 6, "per_device_train_batch_size": 2, "save_hf_weights": False}
    sections = {
        "model": {
            "model_name_or_path": str(ORACLES / "models" / "tiny-qwen3"),
            "tokenizer_name_or_path": str(ORACLES / "tokenizer"),
        },
        "data": data[stage]
        | {"dataset_dir": str(ORACLES / "data"), "cutoff_len": 64, "streaming": True, "buffer_size": 20},
        "parallel": {"param_dtype": "fp32"},
        "training": options | {"output_dir": str(output_dir), "lr": 1e-3, "save_steps": 0} | training,
    }
    path = output_dir.with_suffix(".yaml")
    path.write_text(json.dumps(sections))
    return path


def steps(folder: Path) -> list[tuple]:
    return [(r["step"], r["loss"], r["tokens"], r["label_tokens"]) for r in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_a_resumed_run_goes_on_with_the_next_rows(stage, tmp_path):
    assert main([str(configuration(tmp_path / "whole", stage, save_steps=4))]) == 0
    whole = steps(tmp_path / "whole")
    assert len(whole) == len(set(whole)) == 6
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "step-00000004")
    assert main([str(configuration(tmp_path / "rest", stage, resume_from_checkpoint=checkpoint))]) == 0
    assert steps(tmp_path / "rest") == whole[4:]


def test_two_ranks_resume_each_at_its_own_place(tmp_path):
    """The ranks' shares differ, so a rank that resumed at the place of the other would train on other rows."""
    path = configuration(tmp_path / "whole", "sft", save_steps=3)
    finished = launch(["-m", "mindspeed_llm.run", str(path)], 2)
    assert finished.returncode == 0, finished.stderr
    whole = steps(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000003"
    places = json.loads((checkpoint / "state.json").read_text())["positions"]["loader"]["ranks"]
    assert set(places) == {"0", "1"}
    path = configuration(tmp_path / "rest", "sft", resume_from_checkpoint=str(checkpoint))
    finished = launch(["-m", "mindspeed_llm.run", str(path)], 2)
    assert finished.returncode == 0, finished.stderr
    assert steps(tmp_path / "rest") == whole[3:]

    assert main([str(path), f"--training.output_dir={tmp_path / 'alone'}"]) == 2  # one rank has no place of its own


def test_dry_run(tmp_path, capsys):
    assert main([str(configuration(tmp_path / "out", "sft")), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "first sample, " in shown
    assert "steps: 6 in all" in shown
