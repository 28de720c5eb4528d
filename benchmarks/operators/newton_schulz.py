"""The orthogonalization of a weight matrix in Muon."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz

import mindspeed_kernels
from benchmarks.case import OURS, Case, Problem, Work

STEPS = 5


def cases() -> Iterator[Case]:
    for size in (2048,):
        yield Case(
            "newton_schulz",
            f"{size}x{size}",
            torch.bfloat16,
            forward=Work(flops=STEPS * 4 * size**3),  # of three products in a step, two are symmetric
            backward=None,
            build=partial(problem, size),
        )


def problem(size: int) -> Problem:
    return Problem(
        arguments=(torch.randn(size, size),),
        leaves=[],
        contestants={"torch.optim.Muon": _torch, OURS: _ours},
    )


# What comes back is how far each row agrees with that of x: the rounding of single elements, which five steps make
# larger, averages out of it.


def _torch(x: Tensor) -> Tensor:
    return _agreement(_zeropower_via_newtonschulz(x, (DEFAULT_A, DEFAULT_B, DEFAULT_C), STEPS, EPS), x)


def _ours(x: Tensor) -> Tensor:
    return _agreement(mindspeed_kernels.newton_schulz(x), x)


def _agreement(y: Tensor, x: Tensor) -> Tensor:
    return (y * x).sum(-1).to(y.dtype)
