"""The short convolution in front of Qwen3-Next's linear attention."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed_kernels
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, channels in ((4096, 2048),):
            tensor = tokens * channels * dtype.itemsize
            yield Case(
                "causal_conv1d",
                f"{tokens}x{channels}",
                dtype,
                forward=Work(bytes=2 * tensor),  # x; y
                backward=Work(bytes=3 * tensor),  # grad_y, x; grad_x
                build=partial(problem, tokens, channels, dtype),
            )


def problem(tokens: int, channels: int, dtype: torch.dtype) -> Problem:
    x = torch.randn(1, tokens, channels, dtype=dtype, requires_grad=True)
    weight = (torch.randn(channels, 4) / 2).to(dtype)
    return Problem(
        arguments=(x, weight),
        leaves=[x],
        contestants={
            EAGER: _hf,
            COMPILED: torch.compile(_hf, dynamic=False),
            OURS: mindspeed_kernels.causal_conv1d,
        },
    )


def _hf(x: Tensor, weight: Tensor) -> Tensor:
    """What transformers does without the package causal_conv1d, transpositions to its layout and back included."""
    y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), padding=3, groups=x.shape[2])
    return F.silu(y[..., : x.shape[1]]).transpose(1, 2)
