"""One optimizer step over all parameters, gradients clipped: of the size of a small language model."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mindspeed_kernels
from benchmarks.case import OURS, Case, Problem, Work

CLIP = 0.999  # gradients are scaled in place, again in every step: they must not vanish
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
BETAS = 0.9, 0.95


def cases() -> Iterator[Case]:
    for count, size in ((16, 2048),):
        yield Case(
            "adamw_step_",
            f"{count * size**2 / 1e6:.0f}M parameters",
            torch.float32,
            forward=Work(bytes=28 * count * size**2),  # parameter, gradient, two moments; all but the gradient again
            backward=None,
            build=partial(problem, count, size),
        )


def problem(count: int, size: int) -> Problem:
    params = [torch.randn(size, size) for _ in range(count)]
    grads = [0.01 * torch.randn(size, size) for _ in range(count)]
    contestants = {
        "torch foreach": _with(partial(torch.optim.AdamW, foreach=True), params, grads),
        "torch fused": _with(partial(torch.optim.AdamW, fused=True), params, grads),
        OURS: _ours(params, grads),
    }
    if importlib.util.find_spec("deepspeed") is not None:  # it compiles its kernel when first used
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        contestants["DeepSpeed CPU Adam"] = _with(DeepSpeedCPUAdam, params, grads)
    return Problem(arguments=(), leaves=[], contestants=contestants)


def _with(
    make_optimizer: Callable[..., torch.optim.Optimizer], params: list[Tensor], grads: list[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [p.clone().requires_grad_() for p in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad.clone()
    optimizer = make_optimizer(leaves, betas=BETAS, **OPTIONS)

    def step() -> tuple[Tensor, ...]:
        torch._foreach_mul_([leaf.grad for leaf in leaves], CLIP)
        optimizer.step()
        return tuple(leaf.detach() for leaf in leaves)

    return step


def _ours(params: list[Tensor], grads: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    params = [p.clone() for p in params]
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    beta1, beta2 = BETAS
    steps_done = itertools.count(1)

    def step() -> tuple[Tensor, ...]:
        steps = [next(steps_done)] * len(params)
        mindspeed_kernels.adamw_step_(
            params, grads, means, squares, steps, beta1=beta1, beta2=beta2, grad_scale=CLIP, **OPTIONS
        )
        return tuple(params)

    return step
