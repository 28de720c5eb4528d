"""What the cube core of the twin computes, and the layouts that its operands have on their way.

The documentation is that of the public asc-devkit, as for test_twin_instructions.py.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.ascend.native import Report, report_of, twin_tests

L1_FLOATS = 2048


def product(
    a: torch.Tensor, b: torch.Tensor, *, across: tuple[bool, bool] = (False, False), twice: bool = False
) -> tuple[torch.Tensor, Report]:
    """The product of ``[m, k]`` and ``[k, n]``, of which A lies in memory so or, across, as ``[k, m]``, and B as
    ``[n, k]`` or, across, so."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n)
    laid = [a.T if across[0] else a, b if across[1] else b.T]
    tensors = [out, *(t.contiguous() for t in laid)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    name = str(a.dtype).removeprefix("torch.").encode()
    return out, report_of(twin_tests().twin_product, name, *pointers, m, n, k, *across, twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("across", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (30, 40, 70), (1, 33, 7), (50, 17, 48)], ids=str)
def test_product_through_l1_and_l0(dtype: torch.dtype, shape: tuple[int, int, int], across: tuple[bool, bool]):
    """Small integers: exact whatever the order, so that a wrong layout cannot hide."""
    m, n, k = shape
    torch.manual_seed(0)
    a, b = torch.randint(-4, 5, (m, k)).to(dtype), torch.randint(-4, 5, (k, n)).to(dtype)
    out, report = product(a, b, across=across)
    assert report.errors == []
    assert torch.equal(out, a.float() @ b.float())
    assert report.counters["cube_flops"] == 2 * m * n * k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_product_of_a_single_row(dtype: torch.dtype):
    """Which lies in L0A as it lies in memory."""
    a, b = torch.randint(-4, 5, (1, 96)).to(dtype), torch.randint(-4, 5, (96, 20)).to(dtype)
    out, report = product(a, b)
    assert report.errors == []
    assert torch.equal(out, a.float() @ b.float())


# First square, how many, their distance, gaps in fractals between them and between their halves.
@pytest.mark.parametrize("integers", [(0, 1, 0, 0, 0), (1, 2, 3, 1, 0), (0, 2, 1, 0, 1), (2, 2, 2, 3, 1)], ids=str)
def test_transposed_squares(integers: tuple[int, ...]):
    first, count, stride, gap, half_gap = integers
    image, size = np.random.default_rng(0).normal(size=L1_FLOATS).astype(np.float32), 64
    fractals = np.tile(image[:128].reshape(16, 8), (size // 8, 1, 1))
    for i in range(count):
        halves = image[(first + i * stride) * 256 :][:256].reshape(2, 16, 8)
        left, right = np.hsplit(np.hstack(halves).T, 2)
        at = i * (gap + 1)
        fractals[at], fractals[at + half_gap + 1] = left, right
    out, identity = np.empty((16, size), np.float32), np.eye(size, dtype=np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (out, image, identity)]
    report = report_of(twin_tests().twin_squares, *pointers, (ctypes.c_int64 * 5)(*integers), size)
    assert report.errors == []
    np.testing.assert_array_equal(out, np.hstack(fractals))


def test_product_accumulates():
    a, b = torch.randint(-4, 5, (20, 40)).half(), torch.randint(-4, 5, (40, 24)).half()
    out, report = product(a, b, twice=True)
    assert report.errors == []
    assert torch.equal(out, 2 * (a.float() @ b.float()))
