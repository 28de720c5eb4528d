"""Rotary position embedding of queries and keys, half-split, as Llama and Qwen have it."""

from collections.abc import Iterator
from functools import partial

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import mindspeed_kernels
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, heads, key_heads, head_dim in ((4096, 16, 4, 128),):
            tensors = tokens * (heads + key_heads) * head_dim * dtype.itemsize
            yield Case(
                "rotary",
                f"{tokens} tokens, {heads}/{key_heads} heads, d {head_dim}",
                dtype,
                forward=Work(bytes=2 * tensors),
                backward=Work(bytes=2 * tensors),
                build=partial(problem, tokens, heads, key_heads, head_dim, dtype),
            )


def problem(tokens: int, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> Problem:
    # [1, heads, tokens, head_dim], the transposed views of projections that attention rotates.
    q, k = (
        torch.randn(1, tokens, n, head_dim, dtype=dtype).transpose(1, 2).requires_grad_() for n in (heads, key_heads)
    )
    angles = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat((angles, angles), dim=-1)[None]  # [1, tokens, head_dim]
    return Problem(
        arguments=(q, k, angles.cos().to(dtype), angles.sin().to(dtype)),
        leaves=[q, k],
        contestants={
            EAGER: apply_rotary_pos_emb,
            COMPILED: torch.compile(apply_rotary_pos_emb, dynamic=False),
            OURS: mindspeed_kernels.rotary,
        },
    )
