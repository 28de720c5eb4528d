"""The weighted sum of what the experts return for each token."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import mindspeed_kernels
from benchmarks.case import COMPILED, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, top_k, hidden in ((4096, 2, 1024), (2048, 8, 2048)):
            row = hidden * dtype.itemsize
            yield Case(
                "moe_unpermute",
                f"{tokens}x{hidden}, top {top_k}",
                dtype,
                forward=Work(bytes=(top_k + 1) * tokens * row),  # the rows; the tokens
                backward=Work(bytes=(2 * top_k + 1) * tokens * row),  # the rows and their gradients; the tokens'
                build=partial(problem, tokens, top_k, hidden, dtype),
            )


def problem(tokens: int, top_k: int, hidden: int, dtype: torch.dtype) -> Problem:
    y_sorted = torch.randn(tokens * top_k, hidden, dtype=dtype, requires_grad=True)
    weights = torch.rand(tokens, top_k).softmax(-1).to(dtype).requires_grad_()
    source = torch.randint(16, (tokens * top_k,)).argsort(stable=True)
    return Problem(
        arguments=(y_sorted, source, weights),
        leaves=[y_sorted, weights],
        contestants={
            "gather": _gather,  # as transformers' grouped_mm experts do it
            COMPILED: torch.compile(_gather, dynamic=False),
            "index_add_": _index_add,
            OURS: mindspeed_kernels.moe_unpermute,
        },
    )


def _gather(y_sorted: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    weighted = y_sorted * weights.flatten()[source].unsqueeze(-1)
    position = torch.empty_like(source)
    position[source] = torch.arange(len(source))
    return weighted[position].view(*weights.shape, -1).sum(1)


def _index_add(y_sorted: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    weighted = y_sorted * weights.flatten()[source].unsqueeze(-1)
    tokens = torch.zeros(len(weights), y_sorted.shape[1], dtype=y_sorted.dtype)
    return tokens.index_add_(0, source // weights.shape[1], weighted)
