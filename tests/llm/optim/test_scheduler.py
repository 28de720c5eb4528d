"""Learning rates of every step."""

import math

import pytest
import torch

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.optim.scheduler import SchedulerFactory, warmup_steps


def rates(total: int, **options) -> list[float]:
    training = TrainingConfig(output_dir="unused", **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.lr)
    scheduler = SchedulerFactory(training).create(optimizer, total)
    result = []
    for _ in range(total):
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
