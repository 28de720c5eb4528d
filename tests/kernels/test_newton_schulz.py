"""newton_schulz against its definition in float64: shapes, stacks, symmetric products, zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_kernels import newton_schulz, reference
from tests.kernels.compare import KERNEL_DTYPES, assert_close, on_threads

SHAPES = [(5, 9), (9, 5), (1, 7), (7, 1), (33, 33), (3, 6, 10), (2, 2, 10, 6), (700, 600), (2, 530, 1100)]


def matrices(shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error in the Frobenius norm."""
    difference = (actual.double() - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
    return difference.max().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_definition(shape: tuple[int, ...]) -> None:
    """In float32 to its rounding; also for matrices that are cut into blocks, odd sizes among them."""
    x = matrices(shape)
    expected = reference.newton_schulz(x.double())
    y = newton_schulz(x, dtype=torch.float32)
    assert (y.shape, y.dtype) == (x.shape, torch.float32)
    assert error(y, expected) < 1e-4
    half = newton_schulz(x)
    assert half.dtype == torch.bfloat16
    # Each of five steps rounds to 2^-9 and multiplies small singular values, and their errors, by up to 3.4.
    assert error(half, expected) < 0.1


def test_singular_values_come_out_near_one() -> None:
    u, _, vt = torch.linalg.svd(matrices((40, 60)), full_matrices=False)
    x = u * torch.logspace(-2, 0, 40) @ vt
    values = torch.linalg.svdvals(newton_schulz(x, dtype=torch.float32))
    assert values.max() < 1.3
    assert values[:36].min() > 0.6  # the smallest hundredths of the largest take more steps


def test_matrices_of_a_stack_are_independent() -> None:
    x = matrices((3, 20, 30))
    scaled = torch.cat((x[:1], 1000 * x[1:2], x[2:]))
    assert error(newton_schulz(scaled, dtype=torch.float32), newton_schulz(x, dtype=torch.float32).double()) < 1e-4
    for single, of_stack in zip(x, newton_schulz(x, dtype=torch.float32), strict=True):
        assert error(newton_schulz(single, dtype=torch.float32), of_stack.double()) < 1e-4


def test_zeros_stay_zeros() -> None:
    x = matrices((2, 6, 8))
    x[0] = 0
    y = newton_schulz(x)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert y[1].isfinite().all()


def test_strides_and_the_argument_do_not_matter() -> None:
    x = matrices((12, 9)).t()
    before = x.clone()
    assert torch.equal(newton_schulz(x), newton_schulz(x.contiguous()))
    assert torch.equal(x, before)


def test_a_vector_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"x must be \[..., rows, columns\], but is \[3\]"):
        newton_schulz(torch.ones(3))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 5, 0), (2, 37, 20), (1, 550, 40), (1, 96, 2100)], ids=str)
def test_symmetric_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Odd sizes, several blocks, a depth of several blocks; symmetric to the last bit."""
    y = matrices(shape).to(dtype)
    x = matrices((shape[0], shape[1], shape[1])).to(dtype)
    x = x + x.mT
    out = torch.ops.mindspeed.symmetric_product(y, x, 0.5, -2.0)
    assert torch.equal(out, out.mT)
    wide = y.double()
    scale = 0.5 * (wide.abs() @ wide.abs().mT) + 2 * x.double().abs()
    assert_close(out, 0.5 * wide @ wide.mT - 2 * x.double(), "out", scale=scale)
    assert_close(torch.ops.mindspeed.symmetric_product(y, None, 1.0, 0.0), wide @ wide.mT, "without x", scale=scale)
    transposed = y.mT.contiguous().mT
    assert torch.equal(torch.ops.mindspeed.symmetric_product(transposed, x.mT, 0.5, -2.0), out)


def test_symmetric_product_does_not_depend_on_threads() -> None:
    y = matrices((2, 600, 70)).bfloat16()
    first, second = on_threads((1, 3), lambda: torch.ops.mindspeed.symmetric_product(y, None, 1.0, 0.0))
    assert torch.equal(first, second)


def test_symmetric_product_names_what_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match=r"y must be \[batch, size, depth\], but has shape \[3, 4\]"):
        torch.ops.mindspeed.symmetric_product(torch.ones(3, 4), None, 1.0, 0.0)
    with pytest.raises(RuntimeError, match=r"x must be \[1, 3, 3\], but has shape \[1, 3, 4\]"):
        torch.ops.mindspeed.symmetric_product(torch.ones(1, 3, 4), torch.ones(1, 3, 4), 1.0, 0.0)
