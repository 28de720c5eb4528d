"""swiglu against its definition: values, gradients, layouts, extreme arguments, edge cases, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import reference, swiglu
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)


def check(*inputs: Tensor, grad_layout: str = "contiguous") -> None:
    """Values and gradients for ``(gate, up)`` or ``([gate | up],)``."""
    grad = LAYOUTS[grad_layout](torch.randn_like(swiglu(*inputs)))
    (y,), grads = gradients(swiglu, inputs, (grad,))
    (expected_y,), expected_grads = in_double(reference.swiglu, inputs, (grad,))
    assert_close(y, expected_y, "y")
    for name, actual, expected in zip(("grad_gate", "grad_up"), grads, expected_grads, strict=False):
        assert_close(actual, expected, name)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (7, 3), (3, 5, 17), (2, 3, 4, 64), (70, 130), (2, 3000)])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gate, up = 3 * torch.randn(2, *shape).to(dtype)
    check(gate, up)
    check(torch.cat((gate, up), -1))


def test_concatenated_equals_separate() -> None:
    torch.manual_seed(1)
    gate, up, grad = torch.randn(3, 6, 50).bfloat16()
    (y,), (grad_gate, grad_up) = gradients(swiglu, (gate, up), (grad,))
    (y_both,), (grad_both,) = gradients(swiglu, (torch.cat((gate, up), -1),), (grad,))
    assert torch.equal(y, y_both)
    assert torch.equal(torch.cat((grad_gate, grad_up), -1), grad_both)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 70),
    st.sampled_from(KERNEL_DTYPES),
    *[st.sampled_from(sorted(LAYOUTS))] * 3,
    st.booleans(),
)
def test_any_call(leading, length, dtype, gate_layout, up_layout, grad_layout, concatenated) -> None:
    torch.manual_seed(length)
    gate, up = torch.randn(2, *leading, length).to(dtype)
    if concatenated:
        check(LAYOUTS[gate_layout](torch.cat((gate, up), -1)), grad_layout=grad_layout)
    else:
        check(LAYOUTS[gate_layout](gate), LAYOUTS[up_layout](up), grad_layout=grad_layout)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_extreme_arguments(dtype: torch.dtype) -> None:
    """The sigmoid saturates without overflow; infinity and NaN come through as in PyTorch."""
    torch.manual_seed(6)
    gate = torch.cat((torch.linspace(-120, 120, 4801), torch.tensor([-1e4, -1e3, 0.0, 1e3, 1e4]))).to(dtype)
    check(gate, torch.ones_like(gate))
    special = torch.tensor([torch.inf, torch.nan, -torch.nan], dtype=dtype)
    y = swiglu(special, torch.ones_like(special))
    assert y[0] == torch.inf
    assert y[1:].isnan().all()


def test_expanded_gradient() -> None:
    torch.manual_seed(2)
    gate, up = torch.randn(2, 4, 9)
    gate.requires_grad_()
    up.requires_grad_()
    swiglu(gate, up).sum().backward()
    _, expected = in_double(reference.swiglu, (gate, up), (torch.ones(4, 9),))
    assert_close(gate.grad, expected[0], "grad_gate")
    assert_close(up.grad, expected[1], "grad_up")


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_zero_sizes(shape: tuple[int, ...]) -> None:
    for inputs in ((torch.randn(shape), torch.randn(shape)), (torch.randn(shape),)):
        leaves = [t.requires_grad_() for t in inputs]
        swiglu(*leaves).sum().backward()
        assert all(t.grad.shape == t.shape for t in leaves)


def test_thread_count_does_not_show() -> None:
    torch.manual_seed(3)
    gate, up, grad = torch.randn(3, 1100, 129)
    results = on_threads((1, 2, 3), lambda: gradients(swiglu, (gate, up), (grad,)))
    for outputs, grads in results[1:]:
        assert all(map(torch.equal, outputs + grads, results[0][0] + results[0][1]))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_larger_than_the_cache(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    gate, up, grad = torch.randn(3, 4096, 2048).to(dtype)
    whole = (swiglu(gate, up), *torch.ops.mindspeed.swiglu_backward(grad, gate, up))
    pieces = [
        (swiglu(g, u), *torch.ops.mindspeed.swiglu_backward(d, g, u))
        for g, u, d in zip(gate.split(256), up.split(256), grad.split(256), strict=True)
    ]
    for i, tensor in enumerate(whole):
        assert torch.equal(tensor, torch.cat([piece[i] for piece in pieces]))


def test_second_derivative() -> None:
    torch.manual_seed(5)
    check_second_derivative(swiglu, reference.swiglu, torch.randn(2, 3, 6).unbind())


def test_backward_operator_cannot_be_differentiated_silently() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    grad, _ = torch.ops.mindspeed.swiglu_backward(x, x, x)
    with pytest.raises(RuntimeError, match="swiglu_backward has no derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (((2, 8), (2, 7)), ["up", "gate", "[2, 8]", "[2, 7]"]),
        (((2, 8), (1, 8)), ["up", "gate", "[2, 8]", "[1, 8]"]),
        (((2, 7),), ["gate", "even", "[2, 7]"]),
    ],
    ids=["up-shape", "up-broadcast", "odd"],
)
def test_errors_name_the_arguments(dtype: torch.dtype, shapes, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        swiglu(*(torch.ones(shape, dtype=dtype) for shape in shapes))
    assert all(part in str(error.value) for part in ("swiglu", *named)), error.value


def test_dtypes_must_agree() -> None:
    with pytest.raises(RuntimeError, match=r"swiglu: up must have the dtype of gate, Float, but has BFloat16"):
        swiglu(torch.ones(8), torch.ones(8).bfloat16())


def test_float64_is_exact() -> None:
    gate, up = torch.randn(2, 3, 8, dtype=torch.float64)
    assert torch.equal(swiglu(gate, up), reference.swiglu(gate, up))


@pytest.mark.large
def test_more_elements_than_int32_counts() -> None:
    """Rows beyond 2^31 elements; the inputs are expanded rows, so that only the output takes memory."""
    length = 2**15
    gate, up = (t.bfloat16().expand(2**16 + 8, length) for t in torch.randn(2, 1, length))
    y = swiglu(gate, up)
    expected = swiglu(gate[:1], up[:1])[0]
    for row in (0, 2**15, 2**16 - 1, 2**16, -1):
        assert torch.equal(y[row], expected)
