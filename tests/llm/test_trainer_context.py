"""A run that divides every sequence among ranks: the same numbers, checkpoints and export as one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from tests.distributed import launch
from tests.llm.test_trainer import folder, run, settings  # noqa: F401

OPTIONS = {
    "num_train_epochs": 2.0, "save_steps": 2, "save_total_limit": None, "router_aux_loss_coef": 0.1, "eval_steps": 3,
}  # fmt: skip
EXACT = ("epoch", "lr", "tokens", "label_tokens", "expert_load")
WITHIN = {"loss": 1e-6, "aux_loss": 1e-6, "eval_loss": 1e-6, "grad_norm": 1e-5}


def config_of(folder: Path, output_dir: Path, **training):  # noqa: F811
    """Mixture of experts, 7 rows of uneven length in windows of three and one row left, evaluated on two more."""
    config = settings(folder, output_dir, "moe", **OPTIONS | training)
    return config.model_copy(update={"data": config.data.model_copy(update={"val_size": 2.0})})


def run_with(config, ranks: int, *overrides: str) -> list[dict]:
    path = Path(config.training.output_dir).with_suffix(".yaml")
    path.write_text(config.dump_yaml())
    finished = launch(["-m", "mindspeed_llm.run", str(path), *overrides], ranks)
    assert finished.returncode == 0, finished.stderr
    return read_metrics(Path(config.training.output_dir) / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> Path:  # noqa: F811
    """The run of one process."""
    path = tmp_path_factory.mktemp("whole") / "out"
    run(config_of(folder, path))
    return path


@pytest.fixture(scope="module")
def ring(folder, tmp_path_factory) -> Path:  # noqa: F811
    """The run of two ranks, each with half of every row."""
    path = tmp_path_factory.mktemp("ring") / "out"
    run_with(config_of(folder, path), 2, "--parallel.cp_size=2", "--parallel.cp_type=ring")
    return path


def assert_same_steps(actual: list[dict], expected: list[dict]) -> None:
    assert [r["step"] for r in actual] == [r["step"] for r in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert {key: ours.get(key) for key in EXACT} == {key: theirs.get(key) for key in EXACT}
        for key, tolerance in WITHIN.items():
            assert (key in ours) == (key in theirs)
            if key in ours:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=0), key


def test_metrics_equal_one_process(ring, whole):
    """Peers' report E26: tokens, losses and norms; the evaluation too."""
    expected = read_metrics(whole / "metrics.jsonl")
    assert sum("eval_loss" in record for record in expected) == 2
    assert_same_steps(read_metrics(ring / "metrics.jsonl"), expected)


@pytest.mark.slow
def test_metrics_of_four_ranks_equal_one_process(whole, folder, tmp_path):  # noqa: F811
    options = ["--parallel.cp_size=4", "--parallel.cp_type=hybrid", "--parallel.ulysses_size=2"]
    steps = run_with(config_of(folder, tmp_path / "out"), 4, *options)
    assert_same_steps(steps, read_metrics(whole / "metrics.jsonl"))


def test_one_process_goes_on_with_a_run_of_two_ranks(ring, folder, tmp_path):  # noqa: F811
    """The place in the data is that of the rows, which the ranks share."""
    resume = {"resume_from_checkpoint": str(ring / "checkpoints" / "step-00000002"), "save_hf_weights": False}
    steps = run(config_of(folder, tmp_path / "out", **resume))
    assert_same_steps(steps, read_metrics(ring / "metrics.jsonl")[2:])


def test_the_export_knows_nothing_of_the_ranks(ring, whole):
    exported = [json.loads((path / "hf" / "config.json").read_text()) for path in (ring, whole)]
    assert exported[0] == exported[1]
    models = [AutoModelForCausalLM.from_pretrained(path / "hf", dtype=torch.float32) for path in (ring, whole)]
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits, rtol=1e-4, atol=1e-5)


def test_heads_that_cannot_be_divided_are_told_before_the_run(folder, tmp_path, capsys):  # noqa: F811
    """Peers' report E21: 4 heads, 3 ranks."""
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out").dump_yaml())
    assert main([str(path), "--dry-run", "--world-size=3", "--parallel.cp_size=3"]) == 2
    assert "parallel.cp_type: 4 attention heads cannot be divided among 3 ranks; use" in capsys.readouterr().err


def test_a_dry_run_counts_the_rows_of_groups(folder, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out").dump_yaml())
    assert main([str(path), "--dry-run", "--world-size=8", "--parallel.cp_size=4"]) == 0
    assert "a step: 1 rows × 3 micro-batches × 2 groups of 4 ranks = 6 rows" in capsys.readouterr().out
