"""``training.parity: megatron``: losses, gradient norms and rates of every step as Megatron-core had them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from tests.distributed import launch

ORACLES = Path(__file__).parent.parent / "data" / "oracles"
CASE = json.loads((ORACLES / "megatron" / "gpt_dense.json").read_text())


def configuration(output_dir: Path, **training) -> Path:
    """Megatron's settings under our names. The schedule is longer than the recorded part of the run."""
    theirs = CASE["config"]
    options = {
        "stage": "pt",
        "parity": "megatron",
        "seed": 1234,
        "max_steps": theirs["lr_decay_iters"],
        "warmup_steps": theirs["lr_warmup_iters"],
        "lr": theirs["lr"],
        "min_lr": theirs["min_lr"],
        "lr_scheduler_type": theirs["lr_decay_style"],
        "weight_decay": theirs["weight_decay"],
        "adam_beta1": theirs["adam_beta1"],
        "adam_beta2": theirs["adam_beta2"],
        "adam_epsilon": theirs["adam_eps"],
        "max_grad_norm": theirs["clip_grad"],
        "per_device_train_batch_size": theirs["micro_batch_size"],
        "gradient_accumulation_steps": theirs["global_batch_size"] // theirs["micro_batch_size"],
        "output_dir": str(output_dir),
        "save_steps": 0,
        "save_hf_weights": False,
    }
    sections = {
        "model": {
            "model_name_or_path": str(ORACLES / "models" / CASE["model"]),
            "tokenizer_name_or_path": str(ORACLES / "tokenizer"),
        },
        "data": {
            "dataset": {"file_name": str(ORACLES / "megatron" / "corpus_a")},
            "data_manager_type": "mg",
            "split": "900,80,20",
            "cutoff_len": theirs["seq_length"],
        },
        "parallel": {"param_dtype": "fp32"},
        "training": options | training,
    }
    path = output_dir.with_suffix(".yaml")
    path.write_text(json.dumps(sections))
    return path


def assert_steps_equal(folder: Path) -> None:
    records = read_metrics(folder / "metrics.jsonl")[: len(CASE["steps"])]
    for ours, theirs in zip(records, CASE["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=2e-6)
        assert ours["lr"] == theirs["lr"]
        assert ours["label_tokens"] == sum(batch["tokens"] for batch in theirs["micro_batches"])


def test_steps_of_one_process(tmp_path):
    assert main([str(configuration(tmp_path / "out"))]) == 0
    assert_steps_equal(tmp_path / "out")


@pytest.mark.parametrize(("accumulation", "cp_size"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_steps_of_two_ranks(accumulation, cp_size, tmp_path):
    """The same global batches: two ranks with half the accumulation, or with halves of every sequence."""
    path = configuration(tmp_path / "out", gradient_accumulation_steps=accumulation)
    finished = launch(["-m", "mindspeed_llm.run", str(path), f"--parallel.cp_size={cp_size}"], 2)
    assert finished.returncode == 0, finished.stderr
    assert_steps_equal(tmp_path / "out")


def test_without_parity_documents_are_apart(tmp_path):
    """Its first batch has a target at every position and documents that see each other; ours has neither."""
    assert main([str(configuration(tmp_path / "out", parity="none"))]) == 0
    record = read_metrics(tmp_path / "out" / "metrics.jsonl")[0]
    theirs = CASE["steps"][0]
    assert record["label_tokens"] < 512
    assert abs(record["loss"] - theirs["loss"]) > 1e-3
    assert record["lr"] > theirs["lr"] == 0


def test_a_run_of_two_epochs_is_one_pass_over_their_common_order(tmp_path, capsys):
    """Two epochs of 125 samples are shuffled together; progress and evaluation still count in epochs."""
    options = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 25}
    path = configuration(tmp_path / "out", gradient_accumulation_steps=1, **options)
    assert main([str(path), "--dry-run"]) == 0
    assert "steps: 5 per epoch of 125 rows, 10 in all" in capsys.readouterr().out
    assert main([str(path)]) == 0
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [record["epoch"] for record in records] == [pytest.approx(step / 5) for step in range(1, 11)]
    assert [record["step"] for record in records if "eval_loss" in record] == [5, 10]


def test_a_resumed_run_goes_on_in_the_same_order(tmp_path):
    assert main([str(configuration(tmp_path / "out", save_steps=3))]) == 0
    checkpoint = str(tmp_path / "out" / "checkpoints" / "step-00000006")
    assert main([str(configuration(tmp_path / "again", resume_from_checkpoint=checkpoint))]) == 0
    whole, rest = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("out", "again"))
    assert [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in rest] == [
        (r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in whole[6:]
    ]


@pytest.mark.parametrize(
    "form", [{}, {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}]
)
def test_a_blend_trains_and_is_evaluated(form, tmp_path):
    """With all resets and parity the samples are those of no parity, where documents are apart."""
    paths = [str(ORACLES / "megatron" / name) for name in ("corpus_a", "corpus_b")]
    blend = {"file_name": [0.3, paths[0], 0.7, paths[1]]}
    losses = []
    for parity in ("megatron", "none"):
        options = {"max_steps": 2, "parity": parity, "eval_steps": 2, "warmup_steps": 0, "lr": 1e-3}
        path = configuration(tmp_path / parity, gradient_accumulation_steps=1, **options)
        sections = json.loads(path.read_text())
        sections["data"] |= {"dataset": blend, "split": "700,200,100"} | form
        path.write_text(json.dumps(sections))
        assert main([str(path)]) == 0
        records = read_metrics(tmp_path / parity / "metrics.jsonl")
        losses.append([record["loss"] for record in records])
        assert records[-1]["eval_loss"] > 0
    assert (losses[0][0] == pytest.approx(losses[1][0], abs=1e-6)) == bool(form)
