"""Learning rates of every step."""

import json
import math
from pathlib import Path

import pytest
import torch

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.optim.scheduler import SchedulerFactory, count_steps, warmup_steps


def rates(total: int, steps: int | None = None, **options) -> list[float]:
    training = TrainingConfig(output_dir="unused", **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.lr)
    scheduler = SchedulerFactory(training).create(optimizer, total)
    result = []
    for _ in range(steps or total):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


def test_warm_up_learns_from_the_first_step_and_reaches_the_peak():
    assert rates(10, lr=1.0, lr_scheduler_type="constant", warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_ends_at_min_lr_and_never_goes_below(kind):
    result = rates(20, lr=1e-3, lr_scheduler_type=kind, warmup_steps=5, min_lr=1e-4)
    assert max(result) == result[4] == 1e-3
    assert result[4:] == sorted(result[4:], reverse=True)
    assert result[-1] == pytest.approx(1e-4, rel=1e-12)


def test_cosine_is_the_formula():
    result = rates(10, lr=2.0, lr_scheduler_type="cosine", warmup_steps=0, min_lr=0.5)
    for step, rate in enumerate(result, start=1):
        assert rate == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi * step / 10)) / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("total", "options"), [(1, {}), (10, {"warmup_steps": 10}), (3, {"warmup_steps": 100}), (1, {"lr": 0.0})]
)
def test_edges_divide_by_nothing(total, options):
    assert all(math.isfinite(rate) for rate in rates(total, **options))


def test_a_small_ratio_is_not_rounded_away():
    assert warmup_steps(TrainingConfig(output_dir="unused", warmup_ratio=0.01), 20) == 1
    assert warmup_steps(TrainingConfig(output_dir="unused", warmup_ratio=0.0), 20) == 0
    assert warmup_steps(TrainingConfig(output_dir="unused"), 100) == 3


MEGATRON = json.loads((Path(__file__).parents[2] / "data/oracles/megatron/lr_schedules.json").read_text())["schedules"]


@pytest.mark.parametrize("case", MEGATRON, ids=lambda case: f"{case['lr_decay_style']}-{case['lr_warmup_iters']}")
def test_megatron_s_rates_are_the_same_floats(case):
    result = rates(
        case["lr_decay_iters"],
        steps=len(case["lr_per_iteration"]),
        parity="megatron",
        lr=case["max_lr"],
        min_lr=case["min_lr"],
        lr_scheduler_type=case["lr_decay_style"].lower(),
        warmup_steps=case["lr_warmup_iters"],
        wsd_decay_steps=case["lr_wsd_decay_iters"],
        wsd_decay_style=case["lr_wsd_decay_style"] or "minus_sqrt",
    )
    assert result == case["lr_per_iteration"]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_llamafactory_s_rates_are_a_step_late(kind):
    """Its first step has rate 0, every other step the rate that ours had before it, and ``min_lr`` is not known."""
    options = {"lr": 1e-3, "lr_scheduler_type": kind, "warmup_steps": 4}
    ours, theirs = rates(20, min_lr=0.0, **options), rates(20, min_lr=1e-4, parity="llamafactory", **options)
    assert theirs[0] == 0.0
    assert theirs[1:] == pytest.approx(ours[:-1], rel=1e-12)
    assert ours[-1] < 1e-12 < theirs[-1]


def test_megatron_s_warm_up_begins_with_rate_0():
    """And what ours has in the last step would come one step after it."""
    options = {"lr": 1e-3, "min_lr": 1e-4, "lr_scheduler_type": "linear", "warmup_steps": 4}
    ours, theirs = rates(20, **options), rates(20, steps=21, parity="megatron", **options)
    assert theirs[0] == 0.0
    assert theirs[1:] == pytest.approx(ours, rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "minus_sqrt"])
def test_wsd_stays_at_the_peak_and_ends_at_min_lr(style):
    options = {"lr": 1.0, "min_lr": 0.1, "lr_scheduler_type": "wsd", "warmup_steps": 2, "wsd_decay_style": style}
    result = rates(20, wsd_decay_steps=4, **options)
    assert result[1:16] == [1.0] * 15
    assert result[15:] == sorted(result[15:], reverse=True)
    assert result[17] == pytest.approx(0.55 if style == "linear" else 1 - 0.9 * math.sqrt(0.5))
    assert result[-1] == pytest.approx(0.1)
    tenth = rates(20, **options)
    assert tenth[:18] == [0.5] + [1.0] * 17
    assert tenth[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("epochs", "steps", "total"), [(3.0, 10 / 3, 10), (0.5, 5, 3), (1.5, 4, 6)])
def test_a_part_of_an_epoch_is_rounded_up_once(epochs, steps, total):
    training = TrainingConfig(output_dir="unused", num_train_epochs=epochs)
    assert count_steps(training, steps) == total
    assert count_steps(training.model_copy(update={"max_steps": 7}), steps) == 7
