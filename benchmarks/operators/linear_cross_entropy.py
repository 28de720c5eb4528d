"""The head of a language model and its loss: two vocabularies."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed_kernels
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for tokens, hidden_size, vocabulary in ((2048, 1024, 32000), (2048, 1024, 151936)):
        product = 2 * tokens * hidden_size * vocabulary
        yield Case(
            "linear_cross_entropy",
            f"{tokens}x{hidden_size}x{vocabulary}",
            torch.bfloat16,
            forward=Work(flops=product),
            backward=Work(flops=2 * product),
            build=partial(problem, tokens, hidden_size, vocabulary, torch.bfloat16),
        )


def problem(tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype) -> Problem:
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    return Problem(
        arguments=(hidden, weight),
        leaves=[hidden, weight],
        contestants={
            EAGER: partial(_hf, targets),
            COMPILED: torch.compile(partial(_hf, targets), dynamic=False),
            "eager, half-precision logits": partial(_narrow, targets),
            OURS: partial(_ours, targets),
        },
    )


# The losses come in the dtype of the logits, so that they are compared to its rounding.


def _hf(targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """transformers' ForCausalLMLoss widens the logits."""
    return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum").to(hidden.dtype)


def _narrow(targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")


def _ours(targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return mindspeed_kernels.linear_cross_entropy(hidden, weight, targets).to(hidden.dtype)
