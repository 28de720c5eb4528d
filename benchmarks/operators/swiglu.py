"""The gate of a SwiGLU feed-forward layer."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed_kernels
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, intermediate_size in ((4096, 3072),):
            tensor = tokens * intermediate_size * dtype.itemsize
            yield Case(
                "swiglu",
                f"{tokens}x{intermediate_size}",
                dtype,
                forward=Work(bytes=3 * tensor),  # gate, up; y
                backward=Work(bytes=5 * tensor),  # grad_y, gate, up; grad_gate, grad_up
                build=partial(problem, tokens, intermediate_size, dtype),
            )


def problem(tokens: int, intermediate_size: int, dtype: torch.dtype) -> Problem:
    gate, up = (torch.randn(tokens, intermediate_size, dtype=dtype, requires_grad=True) for _ in range(2))
    return Problem(
        arguments=(gate, up),
        leaves=[gate, up],
        contestants={
            EAGER: _hf,
            COMPILED: torch.compile(_hf, dynamic=False),
            OURS: mindspeed_kernels.swiglu,
        },
    )


def _hf(gate: Tensor, up: Tensor) -> Tensor:
    """What is between the linear layers of transformers' MLPs."""
    return F.silu(gate) * up
