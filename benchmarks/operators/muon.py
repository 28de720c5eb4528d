"""One step of Muon on a weight matrix: momentum, orthogonalization, update."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import OURS, Case, Problem, Work
from mindspeed_llm.optim.muon import Muon

STEPS = 5
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


def cases() -> Iterator[Case]:
    for size in (2048,):
        yield Case(
            "muon",
            f"{size}x{size}",
            torch.bfloat16,  # of the products; the parameter is float32
            forward=Work(flops=STEPS * 4 * size**3),  # of three products in a step, two are symmetric
            backward=None,
            build=partial(problem, size),
        )


def problem(size: int) -> Problem:
    grad = torch.randn(size, size)
    # Its name for the scale of our updates, whatever the learning rate is.
    torch_muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw", **OPTIONS)
    return Problem(
        arguments=(),
        leaves=[],
        contestants={
            "torch.optim.Muon": _step(torch_muon, grad),
            OURS: _step(partial(Muon, **OPTIONS), grad, orthogonal=True),
        },
    )


def _step(optimizer: Callable[..., torch.optim.Optimizer], grad: Tensor, **group: Any) -> Callable[[], Tensor]:
    weight = torch.zeros_like(grad, requires_grad=True)  # so that all of it is what the steps added
    weight.grad = grad.clone()
    stepper = optimizer([{"params": [weight], **group}])

    def step() -> Tensor:
        """How far each row agrees with the gradient: the rounding of single elements, which the iteration makes larger,
        averages out of it."""
        stepper.step()
        return (weight.detach() * grad).sum(-1).bfloat16()

    return step
