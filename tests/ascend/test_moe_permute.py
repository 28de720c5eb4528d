"""The AscendC permutation of tokens by expert on the twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ascend.native import kernels
from tests.kernels.compare import KERNEL_DTYPES, assert_close

# Tokens, choices and hidden: one element, odd rows, rows in parts.
SHAPES = [(1, 1, 1), (5, 2, 17), (20, 8, 64), (3, 2, 40000)]


def routing(tokens: int, top_k: int, *, dropped: int) -> tuple[Tensor, Tensor]:
    """A random order of the assignments as sources, with some dropped at the end, and its inverse."""
    order = torch.randperm(tokens * top_k)
    source = torch.where(torch.arange(len(order)) < len(order) - dropped, order, -1)
    position = torch.full((tokens * top_k,), -1)
    kept = source[source >= 0]
    position[kept] = torch.arange(len(kept))
    return source, position.view(tokens, top_k)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dropped", [0, 1])
def test_permutation_and_gradients(dtype: torch.dtype, shape: tuple[int, int, int], dropped: int):
    torch.manual_seed(0)
    tokens, top_k, hidden = shape
    x, y = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens * top_k, hidden).to(dtype)
    weights, grad_out = torch.rand(tokens, top_k), torch.randn(tokens, hidden).to(dtype)
    source, position = routing(tokens, top_k, dropped=dropped)
    twin = kernels(blocks=3)

    expected = torch.where((source >= 0)[:, None], x[source.clamp(min=0) // top_k], torch.zeros((), dtype=dtype))
    assert torch.equal(twin.moe_permute(x, source, top_k), expected)

    wide_y, wide_weights = y.double().requires_grad_(), weights.double().requires_grad_()
    rows = wide_y[position.clamp(min=0)] * (position >= 0)[..., None]  # [tokens, top_k, hidden]
    assert_close(twin.moe_unpermute(y, position), rows.detach().sum(1), "gradient of the permutation", scale=8.0)
    weighted = (rows * wide_weights[..., None]).sum(1)
    assert_close(twin.moe_unpermute(y, position, weights), weighted.detach(), "sum", scale=8.0)

    grad_y, grad_weights = torch.autograd.grad(weighted, (wide_y, wide_weights), grad_out.double())
    actual_y, actual_weights = twin.moe_unpermute_backward(grad_out, y, source, weights)
    assert_close(actual_y, grad_y, "grad_y")
    terms = (y.double().abs() @ grad_out.double().abs().T).max()
    assert_close(actual_weights, grad_weights, "grad_weights", scale=float(terms))
