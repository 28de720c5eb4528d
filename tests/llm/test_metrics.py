"""The record of a run on disk."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from mindspeed_llm.flops import count_training_flops
from mindspeed_llm.metrics import Metrics, describe, read_metrics


def record(step: int, loss: float | None = 2.0) -> dict:
    return {
        "step": step, "epoch": step / 10, "loss": loss, "grad_norm": 1.0, "lr": 1e-4, "tokens": 10, "label_tokens": 5,
        "step_time": 0.5, "tokens_per_second": 20.0, "mfu": None, "memory_gib": 1.0,
    }  # fmt: skip


def write(folder, steps, first_step=0):
    with Metrics(folder, first_step=first_step, total_steps=10, logging_steps=1) as metrics:
        for step in steps:
            metrics.log(record(step))


def test_every_step_is_flushed_at_once(tmp_path):
    with Metrics(tmp_path, first_step=0, total_steps=2, logging_steps=1) as metrics:
        metrics.log(record(1))
        assert read_metrics(tmp_path / "metrics.jsonl") == [record(1)]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_resuming_appends_and_repeats_no_step(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 7), first_step=3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    write(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_loss_that_is_not_finite_is_said_so():
    assert "loss not finite" in describe(record(1, loss=None), 10)
    assert "loss 2.0000" in describe(record(1), 10)
    assert "ETA 0:00:04" in describe(record(1), 10)


def test_every_evaluation_set_is_shown_and_nan_is_null(tmp_path):
    with Metrics(tmp_path, first_step=0, total_steps=1, logging_steps=1) as metrics:
        metrics.log(record(1) | {"eval_loss_a": 1.5, "eval_loss_b": math.nan})
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["eval_loss_b"] is None
    assert "eval_loss_a 1.5000  eval_loss_b not finite" in describe(read_metrics(tmp_path / "metrics.jsonl")[0], 1)


def test_flops_of_a_dense_model():
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    flops = count_training_flops(AutoModelForCausalLM.from_config(config))
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    assert flops.matmul_parameters == 3 * (attention + 3 * 32 * 48) + 100 * 32
    assert flops.attention_width == 3 * 4 * (16 + 16)
    assert flops.of(2, 3) == pytest.approx(6 * (2 * flops.matmul_parameters + 3 * flops.attention_width))


def test_only_the_routed_experts_count():
    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=32, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, num_experts=6, num_experts_per_tok=2,
    )  # fmt: skip
    flops = count_training_flops(AutoModelForCausalLM.from_config(config))
    assert flops.matmul_parameters == pytest.approx(4 * 32 * 32 + 2 * 3 * 32 * 8 + 100 * 32 + 6 * 32)
    assert math.isfinite(flops.of(1, 1))
