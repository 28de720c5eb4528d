"""The AscendC grouped products on the twin, against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ascend.native import kernels
from tests.kernels.compare import KERNEL_DTYPES, assert_close

# Sizes of the groups, k and n: one row, empty groups first, between and last, one column, tails of tiles, several steps
# of k.
CASES = [([1], 40, 16), ([0, 5, 0, 20, 0], 40, 24), ([3, 2], 50, 1), ([130, 3], 70, 150), ([17, 0, 33], 300, 20)]


def reference(x: Tensor, weight: Tensor, sizes: list[int], transposed: bool) -> Tensor:
    weights = weight.double() if transposed else weight.double().transpose(1, 2)
    parts = [rows @ weights[group] for group, rows in enumerate(x.double().split(sizes))]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "k", "n"), CASES)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_and_gradients(dtype: torch.dtype, sizes: list[int], k: int, n: int, transposed: bool):
    torch.manual_seed(0)
    rows, groups = sum(sizes), len(sizes)
    x, grad_y = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
    weight = torch.randn(groups, *((k, n) if transposed else (n, k))).to(dtype)
    offsets = torch.tensor(sizes).cumsum(0).int()
    twin = kernels(blocks=3)
    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = reference(wide_x, wide_weight, sizes, transposed)
    grad_x, grad_weight = torch.autograd.grad(expected, (wide_x, wide_weight), grad_y.double())

    y = twin.grouped_gemm(x, weight, offsets, transposed=transposed)
    assert_close(y, expected.detach(), "y", scale=float((x.double().abs().max() * weight.double().abs().max()) * k))
    back = twin.grouped_gemm(grad_y, weight, offsets, transposed=not transposed)
    assert_close(back, grad_x, "grad_x", scale=float(grad_y.abs().max() * weight.abs().max()) * n)
    actual = twin.grouped_gemm_weight_gradient(grad_y, x, offsets, transposed=transposed)
    assert_close(actual, grad_weight, "grad_weight", scale=float(grad_y.abs().max() * x.abs().max()) * max(sizes))


def test_rows_after_the_last_group_are_left_alone():
    x, weight = torch.randn(10, 16).half(), torch.randn(1, 16, 16).half()
    y = kernels().grouped_gemm(x, weight, torch.tensor([6]).int())
    assert torch.equal(y[6:], torch.zeros(4, 16).half())


def test_refuses_rows_that_are_too_far_apart():
    x, weight, offsets = torch.zeros(1, 65536).half(), torch.zeros(1, 1, 65536).half(), torch.tensor([1]).int()
    with pytest.raises(RuntimeError, match="k 65536 and n 1 are at most 65535"):
        kernels().grouped_gemm(x, weight, offsets)
    with pytest.raises(RuntimeError, match="k 65536 and n 1 are at most 65535"):
        kernels().grouped_gemm_weight_gradient(torch.zeros(1, 1).half(), x, offsets)


def test_counts_every_product():
    x, weight = torch.randn(256, 64).half(), torch.randn(1, 128, 64).half()
    twin = kernels()
    twin.grouped_gemm(x, weight, torch.tensor([256]).int())
    counters = twin.report.counters
    assert counters["cube_flops"] == counters["cube_flops_padded"] == 2 * 256 * 128 * 64
    assert counters["gm_read"] == 2 * (256 * 64 + 2 * 128 * 64) + 2 * 4  # the weight once per tile of rows; the offsets
