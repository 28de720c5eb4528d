"""RMSNorm with a gate, as behind Qwen3-Next's linear attention."""

from collections.abc import Iterator
from functools import partial

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import mindspeed_kernels
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, hidden_size in ((4096 * 16, 128),):
            tensor = rows * hidden_size * dtype.itemsize
            yield Case(
                "rms_norm_gated",
                f"{rows}x{hidden_size}",
                dtype,
                forward=Work(bytes=3 * tensor),  # x, gate; y
                backward=Work(bytes=5 * tensor),  # grad_y, x, gate; grad_x, grad_gate
                build=partial(problem, rows, hidden_size, dtype),
            )


def problem(rows: int, hidden_size: int, dtype: torch.dtype) -> Problem:
    norm = Qwen3NextRMSNormGated(hidden_size).to(dtype)
    x, gate = (torch.randn(rows, hidden_size, dtype=dtype, requires_grad=True) for _ in range(2))
    eps = norm.variance_epsilon
    return Problem(
        arguments=(x, gate),
        leaves=[x, gate],  # eager code rounds every term of the weight's gradient to bfloat16
        contestants={
            EAGER: norm,
            COMPILED: torch.compile(norm, dynamic=False),
            OURS: lambda x, gate: mindspeed_kernels.rms_norm_gated(x, gate, norm.weight, eps=eps),
        },
    )
