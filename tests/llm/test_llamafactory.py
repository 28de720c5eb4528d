"""``training.parity: llamafactory``: losses, gradient norms and rates of every step as LLaMA-Factory had them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.config import Config, load_config
from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from tests.distributed import launch

ORACLES = Path(__file__).parent.parent / "data" / "oracles"
CASES = sorted(path.stem for path in (ORACLES / "cases").glob("*.json"))
_NAMES = {"learning_rate": "lr", "moe_aux_loss_coef": "router_aux_loss_coef"}
_SAME = ("stage", "per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "warmup_ratio")


def configuration(case: dict, output_dir: Path, **training) -> Config:
    """LLaMA-Factory's settings under our names; betas, decay and parity are its defaults."""
    theirs = case["config"]
    data_keys = ("dataset", "template", "cutoff_len", "packing", "neat_packing", "mask_history")
    options = {_NAMES.get(key, key): theirs[key] for key in (*_SAME, *_NAMES, "max_steps", "seed") if key in theirs}
    options |= {"weight_decay": theirs.get("weight_decay", 0.0), "adam_beta2": 0.999, "parity": "llamafactory"}
    options |= {"output_dir": str(output_dir), "save_steps": 0, "save_hf_weights": False} | training
    sections = {
        "model": {
            "model_name_or_path": str(ORACLES / "models" / case["model"]),
            "tokenizer_name_or_path": str(ORACLES / "tokenizer"),
        },
        "data": {"dataset_dir": str(ORACLES / "data")} | {key: theirs[key] for key in data_keys if key in theirs},
        "parallel": {"param_dtype": "fp32"},
        "training": options,
    }
    path = output_dir.with_suffix(".yaml")
    path.write_text(json.dumps(sections))
    return load_config(path)


def load(name: str) -> dict:
    return json.loads((ORACLES / "cases" / f"{name}.json").read_text())


def assert_steps_equal(case: dict, records: list[dict]) -> None:
    assert len(records) == len(case["steps"])
    for ours, theirs in zip(records, case["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=5e-6)
        assert ours["lr"] == theirs["lr"]


@pytest.mark.parametrize("name", CASES)
def test_steps_of_one_process(name, tmp_path):
    case = load(name)
    configuration(case, tmp_path / "out")
    assert main([str(tmp_path / "out.yaml")]) == 0
    assert_steps_equal(case, read_metrics(tmp_path / "out" / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("A_base", {}),
        ("J_moe_aux", {"ep_size": 2}),
        ("A_base", {"cp_size": 2, "cp_type": "ring"}),
        ("J_moe_aux", {"ep_size": 2, "cp_size": 2}),
    ],
)
def test_steps_of_two_ranks(name, layout, tmp_path):
    """The same global batches: two ranks with half the accumulation, or with halves of every sequence."""
    case = load(name)
    accumulation = case["config"]["gradient_accumulation_steps"] // (1 if "cp_size" in layout else 2)
    configuration(case, tmp_path / "out", gradient_accumulation_steps=accumulation)
    options = [f"--parallel.{key}={value}" for key, value in layout.items()]
    finished = launch(["-m", "mindspeed_llm.run", str(tmp_path / "out.yaml"), *options], 2)
    assert finished.returncode == 0, finished.stderr
    assert_steps_equal(case, read_metrics(tmp_path / "out" / "metrics.jsonl"))


@pytest.mark.parametrize("name", ["I_pt", "J_moe_aux"])
def test_without_parity_the_quirks_are_gone(name, tmp_path):
    """Its divisor counts labels that are no targets, its balancing loss grows with the accumulation; ours do not."""
    case = load(name)
    configuration(case, tmp_path / "out", parity="none", max_steps=1)
    assert main([str(tmp_path / "out.yaml")]) == 0
    (record,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    theirs = case["steps"][0]
    if name == "I_pt":  # four rows of 128 labels, 127 of them targets (and documents do not see each other)
        assert (theirs["num_items"], record["label_tokens"] < theirs["num_items"]) == (512, True)
    else:  # two micro-batches: theirs is the sum of two losses of which ours is the mean weighted by tokens
        their_aux_loss = (theirs["loss"] - load("J0_moe_noaux")["steps"][0]["loss"]) / 0.02
        assert 0.4 * their_aux_loss < record["aux_loss"] < 0.6 * their_aux_loss
