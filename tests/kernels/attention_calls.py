"""Calls of flash_attention as its tests make them, held against attention over all scores at once."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mindspeed_kernels import flash_attention
from tests.kernels.compare import LAYOUTS, gradients
from tests.kernels.dense_attention import dense_attention


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def ends(*lengths: int) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grads: list[Tensor], **options):
    """``(out, logsumexp)`` and the gradients of q, k, v and sinks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return flash_attention(q, k, v, sinks=sinks, return_logsumexp=True, **options)

    return gradients(attend, (q, k, v) if sinks is None else (q, k, v, sinks), grads)


def check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, layout: str = "contiguous", **options) -> None:
    """Values and all gradients of one call, all of its tensors arranged in memory as told."""
    arrange = LAYOUTS[layout]
    logsumexp_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    grads = [torch.randn(*q.shape[:-1], v.shape[-1]).to(q.dtype), torch.randn(logsumexp_shape)]
    outputs, input_grads = run(arrange(q), arrange(k), arrange(v), sinks, [arrange(g) for g in grads], **options)
    dense_attention(q, k, v, sinks, *grads, **options).check(*outputs, input_grads)
    assert all(t.dtype == q.dtype for t in (outputs[0], *input_grads[:3]))
