"""grouped_gemm against its definition: values, gradients, layouts, empty groups, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import grouped_gemm, reference
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def check(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool, grad: Tensor) -> None:
    """Values and gradients; errors are relative to the sums of the terms' absolute values."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_gemm(x, weight, offsets, transposed=transposed)

    def definition(x: Tensor, weight: Tensor) -> Tensor:
        return reference.grouped_gemm(x, weight, offsets, transposed=transposed)

    (y,), grads = gradients(function, (x, weight), (grad,))
    (expected_y,), expected_grads = in_double(definition, (x, weight), (grad,))
    (size_y,), size_grads = in_double(definition, (x.abs(), weight.abs()), (grad.abs(),))
    for name, actual, expected, size in zip(
        ("y", "grad_x", "grad_weight"),
        (y, *grads),
        (expected_y, *expected_grads),
        (size_y, *size_grads),
        strict=True,
    ):
        assert actual.dtype == x.dtype
        assert_close(actual, expected, name, scale=size.max().item() if size.numel() else 0.0)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize(
    ("sizes", "rest", "n", "k"),
    [
        ([3], 0, 5, 7),
        ([0, 4, 0, 9, 1], 3, 33, 17),
        ([0, 0, 0], 5, 8, 8),
        ([40, 23, 64], 1, 100, 130),
        ([600, 2], 0, 600, 50),  # several blocks of rows and columns
        ([9], 0, 50, 1500),  # a depth that is cut into blocks
        ([1100, 30], 0, 20, 10),  # the same in the weight's gradient
    ],
    ids=str,
)
def test_values_and_gradients(dtype, transposed: bool, sizes: list[int], rest: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    rows = sum(sizes) + rest
    x, grad = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
    weight = torch.randn(len(sizes), *((k, n) if transposed else (n, k))).to(dtype)
    check(x, weight, offsets_of(sizes), transposed, grad)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(1, 60),
    st.integers(1, 70),
    st.sampled_from(KERNEL_DTYPES),
    st.booleans(),
    *[st.sampled_from(sorted(LAYOUTS))] * 3,
)
def test_any_call(sizes, rest, n, k, dtype, transposed, x_layout, weight_layout, grad_layout) -> None:
    torch.manual_seed(n)
    rows = sum(sizes) + rest
    x, grad = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
    weight = torch.randn(len(sizes), *((k, n) if transposed else (n, k))).to(dtype)
    check(
        LAYOUTS[x_layout](x),
        LAYOUTS[weight_layout](weight),
        offsets_of(sizes),
        transposed,
        LAYOUTS[grad_layout](grad),
    )


def test_rows_past_the_last_offset() -> None:
    """They are neither read nor given a gradient, and come out as 0."""
    x = torch.randn(6, 8)
    x[4:] = torch.nan
    x.requires_grad_()
    weight = torch.randn(2, 3, 8, requires_grad=True)
    y = grouped_gemm(x, weight, torch.tensor([1, 4]))
    assert torch.equal(y[4:], torch.zeros(2, 3))
    grad = torch.full((6, 3), torch.nan)
    grad[:4] = 1.0
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    assert torch.equal(grad_x[4:], torch.zeros(2, 8))
    assert grad_x.isfinite().all()
    assert grad_weight.isfinite().all()


def test_empty_group_has_zero_gradient() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 5, 8, requires_grad=True)
    grouped_gemm(x, weight, torch.tensor([2, 2, 4])).sum().backward()
    assert torch.equal(weight.grad[1], torch.zeros(5, 8))
    assert weight.grad[0].abs().min() > 0


def test_expanded_gradient() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(9, 20), torch.randn(2, 7, 20)
    check(x, weight, torch.tensor([4, 9]), False, torch.ones(()).expand(9, 7))


@pytest.mark.parametrize(
    ("rows", "n", "k", "groups"), [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (0, 4, 3, 0)], ids=str
)
def test_zero_sizes(rows: int, n: int, k: int, groups: int) -> None:
    x, weight = torch.randn(rows, k, requires_grad=True), torch.randn(groups, n, k, requires_grad=True)
    y = grouped_gemm(x, weight, torch.full((groups,), rows))
    assert torch.equal(y, torch.zeros(rows, n)) or k > 0
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    assert rows * n > 0 or not weight.grad.any()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_thread_count_does_not_show(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, weight, grad = torch.randn(1300, 70), torch.randn(3, 90, 70), torch.randn(1300, 90)
    x, weight, grad = x.to(dtype), weight.to(dtype), grad.to(dtype)
    offsets = torch.tensor([600, 601, 1290])
    results = on_threads((1, 2, 3), lambda: gradients(lambda a, b: grouped_gemm(a, b, offsets), (x, weight), (grad,)))
    for outputs, grads in results[1:]:
        assert all(map(torch.equal, outputs + grads, results[0][0] + results[0][1]))


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(700, 1100).bfloat16(), torch.randn(1, 40, 1100).bfloat16()
    whole = grouped_gemm(x, weight, torch.tensor([700]))
    for rows in (slice(0, 1), slice(333, 340), slice(100, 700)):
        assert torch.equal(grouped_gemm(x[rows], weight, torch.tensor([rows.stop - rows.start])), whole[rows])


def test_second_derivative() -> None:
    torch.manual_seed(4)
    inputs, offsets = (torch.randn(5, 6), torch.randn(2, 4, 6)), torch.tensor([3, 5])
    check_second_derivative(
        lambda x, weight: grouped_gemm(x, weight, offsets),
        lambda x, weight: reference.grouped_gemm(x, weight, offsets),
        inputs,
    )


@pytest.mark.parametrize(
    ("x", "weight", "offsets", "named"),
    [
        ((5, 8), (2, 3, 7), [2, 5], ["x [5, 8]", "weight [2, 3, 7]", "[groups, n, k]"]),
        ((5, 8), (3, 8), [2, 5], ["weight [3, 8]"]),
        ((5, 8), (2, 3, 8), [5], ["offsets", "[2, 3, 8]", "[1]"]),
        ((5, 8), (2, 3, 8), [2, 6], ["offsets[1] is 6", "5 rows"]),
        ((5, 8), (2, 3, 8), [3, 2], ["offsets[1] is 2 after 3"]),
        ((5, 8), (2, 3, 8), [-1, 2], ["offsets[0] is -1"]),
        ((5, 8), (2, 3, 8), [2.0, 5.0], ["offsets", "int32 or int64", "Float"]),
    ],
    ids=["depth", "rank", "groups", "beyond", "descending", "negative", "offsets-dtype"],
)
def test_errors_name_the_arguments(x, weight, offsets, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        grouped_gemm(torch.ones(x), torch.ones(weight), torch.tensor(offsets))
    assert all(part in str(error.value) for part in ("grouped_gemm", *named)), error.value


def test_dtypes_must_agree() -> None:
    with pytest.raises(RuntimeError, match="weight must have the dtype of x, Float, but has BFloat16"):
        grouped_gemm(torch.ones(2, 3), torch.ones(1, 4, 3).bfloat16(), torch.tensor([2]))


def test_float64_is_exact() -> None:
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    offsets = torch.tensor([2, 4])
    assert torch.equal(grouped_gemm(x, weight, offsets), reference.grouped_gemm(x, weight, offsets))
