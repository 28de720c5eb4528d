"""A short quickstart learns, and writes everything that a run promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mindspeed_llm.config import load_config
from tests.distributed import REPOSITORY, run

EXAMPLES = REPOSITORY / "examples"
RECORD = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "label_tokens",
    "step_time",
    "tokens_per_second",
    "mfu",
    "memory_gib",
}


def train(name: str, output_dir: Path, *overrides: str, timeout: float = 240) -> str:
    """Run an example with overrides; returns what it printed."""
    command = [sys.executable, "-m", "mindspeed_llm.run", str(EXAMPLES / name), f"--training.output_dir={output_dir}"]
    process = run([*command, *overrides], timeout=timeout)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def read_records(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output_dir = tmp_path_factory.mktemp("quickstart")
    return output_dir, train(
        "quickstart.yaml", output_dir, "--training.max_steps=60", "--training.eval_steps=30", "--training.save_steps=40"
    )


def test_loss_falls_on_questions_that_were_held_out(short_run: tuple[Path, str]) -> None:
    records = read_records(short_run[0])
    assert [record["step"] for record in records] == list(range(1, 61))
    # The model starts from nothing, so from about ln(1024) = 6.9, and knows the answers' wording after 60 steps.
    assert records[0]["loss"] > 6
    assert mean(record["loss"] for record in records[-5:]) < 2.5
    evaluations = {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}
    assert list(evaluations) == [30, 60]
    assert evaluations[60] < evaluations[30]


def test_run_writes_what_it_promises(short_run: tuple[Path, str]) -> None:
    output_dir, _ = short_run
    assert all(record.keys() >= RECORD for record in read_records(output_dir))
    assert load_config(output_dir / "config.yaml").training.max_steps == 60
    checkpoints = sorted(path.parent.name for path in output_dir.glob("checkpoints/*/COMPLETE"))
    assert checkpoints == ["step-00000040", "step-00000060"]
    assert list((output_dir / "tensorboard").iterdir())
    assert (output_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_export_loads_in_plain_transformers(short_run: tuple[Path, str]) -> None:
    folder = short_run[0] / "hf"
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "Qwen3ForCausalLM"
    committed = AutoTokenizer.from_pretrained(EXAMPLES / "quickstart" / "model")
    exported = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    assert exported.chat_template == committed.chat_template
    assert exported.apply_chat_template(messages) == committed.apply_chat_template(messages)


@pytest.mark.slow
def test_bfloat16_learns_like_float32(tmp_path: Path) -> None:
    """Within 1 % in each of 50 steps: masters, optimizer and sums of gradients are float32, only what is computed with
    is rounded. At the example's own rate, eight times this one, curves that differ by rounding part after ten steps.
    """
    curves = []
    for dtype in ("fp32", "bf16"):
        options = ["--training.max_steps=50", "--training.lr=1e-3", "--training.eval_steps=50"]
        options += ["--training.save_hf_weights=false", "--training.sample_prompt=null"]
        train("quickstart.yaml", tmp_path / dtype, f"--parallel.param_dtype={dtype}", *options)
        curves.append([record["loss"] for record in read_records(tmp_path / dtype)])
    for step, (exact, rounded) in enumerate(zip(*curves, strict=True), start=1):
        assert rounded == pytest.approx(exact, rel=0.01), f"step {step}"
    assert step == 50
    assert exact < 3  # it started from 7
    assert curves[0] != curves[1]


def test_exported_model_answers_at_the_end(short_run: tuple[Path, str]) -> None:
    _, printed = short_run
    question, answer = printed.rstrip().splitlines()[-2:]
    assert question == "> What is the capital of France?"
    assert "capital" in answer  # 60 steps teach the form of an answer; the whole example teaches the city


def test_pretraining_learns_from_raw_text(tmp_path: Path) -> None:
    printed = train("quickstart_pretrain.yaml", tmp_path, "--training.max_steps=60", "--training.eval_steps=30")
    records = read_records(tmp_path)
    assert records[0]["loss"] > 6
    assert records[-1]["eval_loss"] < 3.5  # half of what it starts from
    assert records[0]["tokens"] == 8 * 128  # packed: no padding
    assert records[0]["label_tokens"] < 8 * 127  # the last token of a document has no target
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert "The capital of France is" in printed
