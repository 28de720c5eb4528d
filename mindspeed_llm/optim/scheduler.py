"""SchedulerFactory: the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from mindspeed_llm.config import TrainingConfig

_DEFAULT_WARMUP_RATIO = 0.03


class SchedulerFactory:
    """Builds the schedule ``training.lr_scheduler_type`` with linear warm-up."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training

    def create(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
        """A schedule over ``total_steps`` optimizer steps; call its ``step()`` after each one."""
        warmup = warmup_steps(self.training, total_steps)
        kind = self.training.lr_scheduler_type
        floor = min(self.training.min_lr / self.training.lr, 1.0) if self.training.lr > 0 else 1.0
        first = 1
        if self.training.parity == "llamafactory":  # its first step has rate 0, and its decay ends there
            first, floor = 0, 0.0
        return LambdaLR(optimizer, lambda done: learning_rate_factor(kind, first + done, warmup, total_steps, floor))


def set_step(scheduler: LambdaLR, step: int) -> None:
    """Continue after ``step`` steps. The rate depends on the step and the configuration alone, so nothing is stored:
    a run resumed with a changed ``lr`` or length follows the schedule of its new configuration from here on."""
    scheduler.last_epoch = step
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(step)


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Steps of the warm-up, rounded up so that a ratio above 0 is never lost."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    ratio = _DEFAULT_WARMUP_RATIO if training.warmup_ratio is None else training.warmup_ratio
    return math.ceil(total_steps * ratio)


def learning_rate_factor(kind: str, step: int, warmup: int, total: int, floor: float) -> float:
    """Learning rate of the 1-based ``step`` relative to the peak.

    It rises linearly and reaches the peak at step ``warmup``, so that the first step already learns, and falls to
    ``floor`` at step ``total``::

        peak        ─────╮           cosine: floor + (1 - floor) (1 + cos πp) / 2
                   /      ╲          linear: floor + (1 - floor) (1 - p)
        floor     /        ╰───      with p = (step - warmup) / (total - warmup)
                 1  warmup   total
    """
    if step < warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return floor + (1 - floor) * remaining
