"""Causal attention of grouped heads: one document, and several packed into a row."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

import mindspeed_kernels
from benchmarks.case import EAGER, OURS, Case, Problem, Work

SDPA = "SDPA"
HEADS, KEY_HEADS = 16, 4


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for documents, head_dim in (
            ((2048,), 128),
            ((4096,), 128),
            ((2048,), 64),
            ((4096,), 64),
            ((1536, 512, 1280, 768), 128),
        ):
            tokens, pairs = sum(documents), sum(length * (length + 1) // 2 for length in documents)
            packed = f" in {len(documents)} documents" if len(documents) > 1 else ""
            yield Case(
                "flash_attention",
                f"{tokens} tokens{packed}, {HEADS}/{KEY_HEADS} heads, d {head_dim}",
                dtype,
                forward=Work(flops=2 * 2 * pairs * HEADS * head_dim),
                backward=Work(flops=5 * 2 * pairs * HEADS * head_dim),
                build=partial(problem, documents, head_dim, dtype),
            )


def problem(documents: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> Problem:
    tokens = sum(documents)
    q, k, v = (
        torch.randn(1, tokens, heads, head_dim, dtype=dtype).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    mask = (document[:, None] == document).tril()  # [tokens, tokens]
    packed = len(documents) > 1
    contestants = {SDPA: partial(sdpa, mask=mask if packed else None)}
    if tokens <= 2048:  # beyond, its scores take gigabytes
        bias = torch.zeros(tokens, tokens, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]
        contestants[EAGER] = partial(eager, bias=bias)
    contestants[OURS] = mindspeed_kernels.flash_attention
    if packed:
        boundaries = torch.tensor((0, *documents)).cumsum(0)
        contestants[OURS] = partial(ours_packed, boundaries=boundaries)
    return Problem(arguments=(q, k, v), leaves=[q, k, v], contestants=contestants)


def ours_packed(q: Tensor, k: Tensor, v: Tensor, *, boundaries: Tensor) -> Tensor:
    out = mindspeed_kernels.flash_attention(q[0], k[0], v[0], cu_seqlens_q=boundaries, cu_seqlens_k=boundaries)
    return out[None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True).transpose(1, 2)


def eager(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor) -> Tensor:
    module = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, training=True)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return eager_attention_forward(module, q, k, v, bias, q.shape[-1] ** -0.5)[0]
