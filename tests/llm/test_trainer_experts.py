"""A run with its experts spread over ranks: the same numbers, checkpoints and export as one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from tests.distributed import launch
from tests.llm.test_trainer import folder, run, settings  # noqa: F401

EP = "--parallel.ep_size=2"


def run_on_two_ranks(config, *overrides: str) -> list[dict]:
    path = Path(config.training.output_dir).with_suffix(".yaml")
    path.write_text(config.dump_yaml())
    finished = launch(["-m", "mindspeed_llm.run", str(path), *overrides], 2)
    assert finished.returncode == 0, finished.stderr
    return read_metrics(Path(config.training.output_dir) / "metrics.jsonl")


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory) -> dict[str, Path]:  # noqa: F811
    """The same training on one rank and on two with two experts each, with all their checkpoints."""
    path = tmp_path_factory.mktemp("experts")
    options = {"num_train_epochs": 2.0, "save_steps": 2, "save_total_limit": None, "router_aux_loss_coef": 0.1}
    run(settings(folder, path / "one", "moe", **options, gradient_accumulation_steps=4))
    run_on_two_ranks(settings(folder, path / "two", "moe", **options, gradient_accumulation_steps=2), EP)
    return {"one": path / "one", "two": path / "two"}


def assert_same_steps(actual: list[dict], expected: list[dict]) -> None:
    assert [r["step"] for r in actual] == [r["step"] for r in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        for key, tolerance in {"loss": 1e-6, "aux_loss": 1e-6, "grad_norm": 1e-5, "lr": 0, "tokens": 0}.items():
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=0), key


def test_metrics_equal_one_process(runs):
    two, one = (read_metrics(runs[name] / "metrics.jsonl") for name in ("two", "one"))
    assert_same_steps(two, one)
    # In the second step of an epoch, which has three rows, a rank fills a batch with padding that is computed too.
    assert [step["expert_load"] for step in two[::2]] == [step["expert_load"] for step in one[::2]]
    assert all(1 < step["expert_load"] <= 2 for step in two)


@pytest.mark.parametrize(("saved", "resumed"), [("one", "two"), ("two", "one")])
def test_a_run_goes_on_with_the_experts_spread_otherwise(saved, resumed, runs, folder, tmp_path):  # noqa: F811
    options = {
        "num_train_epochs": 2.0, "router_aux_loss_coef": 0.1, "save_hf_weights": False,
        "resume_from_checkpoint": str(runs[saved] / "checkpoints" / "step-00000002"),
        "gradient_accumulation_steps": 4 if resumed == "one" else 2,
    }  # fmt: skip
    config = settings(folder, tmp_path / "out", "moe", **options)
    steps = run(config) if resumed == "one" else run_on_two_ranks(config, EP)
    assert_same_steps(steps, read_metrics(runs[saved] / "metrics.jsonl")[2:])


def test_the_export_has_an_expert_per_key_and_the_same_logits(runs):
    """Peers' report E23: experts that stay random, or stacked keys that no other program finds."""
    models = {}
    for name in ("one", "two"):
        models[name], report = AutoModelForCausalLM.from_pretrained(
            runs[name] / "hf", dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report
    with safe_open(runs["two"] / "hf" / "model.safetensors", "pt") as file:
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in file.keys()  # noqa: SIM118
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(models["two"](ids).logits, models["one"](ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("moe", 3, "3 ranks cannot evenly share the 4 experts in a layer of Qwen3MoeForCausalLM"),
        ("dense", 2, "Qwen3ForCausalLM has no experts that can be spread over ranks"),
    ],
)
def test_experts_that_cannot_be_spread_are_told(model, ranks, message, folder, tmp_path, capsys):  # noqa: F811
    """Peers' report E29, found before anything is read."""
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out", model).dump_yaml())
    assert main([str(path), "--dry-run", f"--world-size={ranks}", f"--parallel.ep_size={ranks}"]) == 2
    assert f"parallel.ep_size: {message}" in capsys.readouterr().err


def test_a_dry_run_counts_the_experts_of_a_rank(folder, tmp_path, capsys):  # noqa: F811
    config = json.loads((folder / "moe" / "config.json").read_text()) | {"moe_intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out", "moe").dump_yaml())
    model = [f"--model.model_name_or_path={tmp_path}", f"--model.tokenizer_name_or_path={folder / 'moe'}"]
    options = ["--model.train_from_scratch=true", "--dry-run", "--world-size=8", "--parallel.ep_size=4"]
    assert main([str(path), *model, *options]) == 0
    one_expert_per_rank = 3 * 32 * 512  # the largest unit; embeddings and head have 1024 * 32 each
    gathered = 2 * one_expert_per_rank * 4  # in use, and the next one; float32
    assert f"parameters gathered for use {gathered / 2**30:.3g} =" in capsys.readouterr().out


def test_a_dry_run_says_what_is_sent(folder, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out", "moe").dump_yaml())
    options = [f"--parallel.{key}" for key in ("fsdp_size=2", "dp_replicate_size=2", "ep_size=2")]
    assert main([str(path), "--dry-run", "--world-size=4", *options]) == 0
    # 64 tokens of 32 float32 numbers, in three micro-batches and two layers; top-2 of two ranks: three of four tokens
    # have an expert on the other rank, of which as many come. Twice in forward, twice in backward, with two weights
    # each way and two choices; 16 bytes agree on the numbers.
    experts = 3 * 2 * (16 + 48 * (4 * 32 * 4 + 2 * 2 * 4 + 2 * 8))
    printed = capsys.readouterr().out
    assert f"tokens to experts {experts / 2**30:.3g} + heads, keys and values 0 =" in printed
