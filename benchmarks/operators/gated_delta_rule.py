"""The gated delta rule of Qwen3-Next's linear attention, and Kimi Linear's with a decay for each channel."""

import inspect
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import mindspeed_kernels
from benchmarks.case import EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, per_channel in ((4096, False), (1024, True)):  # of the latter transformers takes some GB
            heads, dim = 16, 128
            yield Case(
                "gated_delta_rule",
                f"{tokens}, {heads} heads of {dim}{', per channel' if per_channel else ''}",
                dtype,
                forward=Work(flops=4 * _flops(tokens, heads, dim)),
                backward=Work(flops=round(10.75 * _flops(tokens, heads, dim))),
                build=partial(problem, tokens, heads, dim, dtype, per_channel),
            )


def _flops(tokens: int, heads: int, dim: int) -> int:
    """Of one product of `tokens` vectors with a state, for all heads.

    In chunks of half the dimension, triangles counted as half of what is full, forward takes 4 of them: three with the
    state and, within chunks, a quarter each for q·k, k·k, the updates and what is read of them. Backward computes the
    state before each chunk again, 2.75, and differentiates: 6 with states and eight quarters within chunks.
    """
    return 2 * tokens * heads * dim * dim


def problem(tokens: int, heads: int, dim: int, dtype: torch.dtype, per_channel: bool) -> Problem:
    q, k, v = (torch.randn(1, tokens, heads, dim, dtype=dtype) for _ in range(3))
    g = -F.softplus(torch.randn(1, tokens, heads, *([dim] if per_channel else [])))
    beta = torch.rand(1, tokens, heads, dtype=dtype)
    eager = chunk_kimi_delta_attention if per_channel else torch_chunk_gated_delta_rule
    arguments = tuple(t.requires_grad_() for t in (q, k, v, g, beta))
    return Problem(
        arguments=arguments,
        leaves=arguments[:3],  # those of g and beta are small differences of large sums
        contestants={
            EAGER: partial(_hf, inspect.unwrap(eager)),
            OURS: partial(mindspeed_kernels.gated_delta_rule, qk_l2norm=True),
        },
    )


def _hf(function, *arguments: Tensor) -> Tensor:
    return function(*arguments, use_qk_l2norm_in_kernel=True)[0]
