"""RMSNorm with a weight, as Llama and Qwen have it."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mindspeed_kernels
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, hidden_size in ((4096, 2048),):
            tensor = tokens * hidden_size * dtype.itemsize
            yield Case(
                "rms_norm",
                f"{tokens}x{hidden_size}",
                dtype,
                forward=Work(bytes=2 * tensor),  # x; y
                backward=Work(bytes=3 * tensor),  # grad_y, x; grad_x
                build=partial(problem, tokens, hidden_size, dtype),
            )


def problem(tokens: int, hidden_size: int, dtype: torch.dtype) -> Problem:
    norm = LlamaRMSNorm(hidden_size).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.1)
    x = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=True)
    eps = norm.variance_epsilon
    return Problem(
        arguments=(x,),
        leaves=[x, norm.weight],
        contestants={
            EAGER: norm,
            COMPILED: torch.compile(norm, dynamic=False),
            "F.rms_norm": lambda x: F.rms_norm(x, (hidden_size,), norm.weight, eps),
            OURS: lambda x: mindspeed_kernels.rms_norm(x, norm.weight, eps=eps),
        },
    )
