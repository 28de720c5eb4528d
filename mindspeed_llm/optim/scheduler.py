"""SchedulerFactory: the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler

from mindspeed_llm.config import TrainingConfig

_DEFAULT_WARMUP_RATIO = 0.03
_DEFAULT_WSD_RATIO = 0.1


class Schedule(LRScheduler):
    """One learning rate for all parameters: ``rate(done)`` once ``done`` optimizer steps have been taken."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> None:
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.rate(self.last_epoch) for _ in self.optimizer.param_groups]


class SchedulerFactory:
    """Builds the schedule ``training.lr_scheduler_type`` with linear warm-up."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training

    def create(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Schedule:
        """A schedule over ``total_steps`` optimizer steps; call its ``step()`` after each one."""
        training, warmup = self.training, warmup_steps(self.training, total_steps)
        if training.parity == "megatron":
            return Schedule(optimizer, lambda done: megatron_learning_rate(training, done, warmup, total_steps))
        floor = min(training.min_lr / training.lr, 1.0) if training.lr > 0 else 1.0
        first = 1
        if training.parity == "llamafactory":  # its first step has rate 0, and its decay ends there
            first, floor = 0, 0.0
        return Schedule(
            optimizer,
            lambda done: training.lr * learning_rate_factor(training, first + done, warmup, total_steps, floor),
        )


def set_step(scheduler: Schedule, step: int) -> None:
    """Continue after ``step`` steps. The rate depends on the step and the configuration alone, so nothing is stored:
    a run resumed with a changed ``lr`` or length follows the schedule of its new configuration from here on."""
    scheduler.last_epoch = step
    for group in scheduler.optimizer.param_groups:
        group["lr"] = scheduler.rate(step)


def count_steps(training: TrainingConfig, steps_per_epoch: float) -> int:
    """Optimizer steps of the whole run."""
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(round(training.num_train_epochs * steps_per_epoch, 6))  # 3 × (10 / 3) is 10


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Steps of the warm-up, rounded up so that a ratio above 0 is never lost."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    ratio = _DEFAULT_WARMUP_RATIO if training.warmup_ratio is None else training.warmup_ratio
    return math.ceil(total_steps * ratio)


def wsd_decay_steps(training: TrainingConfig, total_steps: int) -> int:
    """Steps at the end in which ``wsd`` decays."""
    return training.wsd_decay_steps or math.ceil(total_steps * _DEFAULT_WSD_RATIO)


def learning_rate_factor(training: TrainingConfig, step: int, warmup: int, total: int, floor: float) -> float:
    """Learning rate of the 1-based ``step`` relative to the peak.

    It rises linearly and reaches the peak at step ``warmup``, so that the first step already learns, and falls to
    ``floor`` at step ``total``::

        peak        ─────╮           floor + (1 - floor) * remaining(step)
                   /      ╲
        floor     /        ╰───
                 1  warmup   total
    """
    if step < warmup:
        return step / warmup
    left = remaining(training, step, warmup, total)
    return 1.0 if left == 1 else floor + (1 - floor) * left  # no rounding at the peak


def megatron_learning_rate(training: TrainingConfig, done: int, warmup: int, total: int) -> float:
    """Learning rate after ``done`` steps, added up in the order of Megatron's ``OptimizerParamScheduler``.

    The first step of a warm-up has rate 0; step ``total + 1`` would be the first one with ``min_lr``.
    """
    if warmup and done <= warmup:
        return training.lr * done / warmup
    if training.lr_scheduler_type == "constant":
        return training.lr
    return training.min_lr + remaining(training, done, warmup, total) * (training.lr - training.min_lr)


def remaining(training: TrainingConfig, step: int, warmup: int, total: int) -> float:
    """How much of the decay is still to come at ``step``: 1 at the end of the warm-up, 0 from step ``total`` on.

    With progress p: cosine (1 + cos πp) / 2, linear 1 - p, both over all steps after the warm-up; ``wsd`` begins only
    at its last ``wsd_decay_steps`` (Hu et al., 2024) and falls as 1 - p or 1 - √p (Hägele et al., 2024).
    """
    kind, begin = training.lr_scheduler_type, warmup
    if kind == "constant":
        return 1.0
    if kind == "wsd":
        begin = max(total - wsd_decay_steps(training, total), warmup)
    progress = min(max(step - begin, 0) / max(total - begin, 1), 1.0)
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if kind == "wsd" and training.wsd_decay_style == "minus_sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress
