"""moe_permute and moe_unpermute against their definitions: order, values, gradients, skipped experts, errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import moe_permute, moe_unpermute, reference
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)


def check_permute(x: Tensor, index: Tensor, num_experts: int, grad: Tensor) -> None:
    (x_sorted, offsets, source), (grad_x,) = _gradients_of_first(moe_permute, x, index, num_experts, grad)
    (expected, expected_offsets, expected_source), (expected_grad,) = _gradients_of_first(
        reference.moe_permute, x.double(), index, num_experts, grad.double()
    )
    assert torch.equal(x_sorted.double(), expected)
    assert torch.equal(offsets, expected_offsets)
    assert offsets.dtype == torch.int32
    assert torch.equal(source, expected_source)
    assert source.dtype == torch.int64
    assert_close(grad_x, expected_grad, "grad_x", scale=grad.abs().max().item() * index.shape[1])


def _gradients_of_first(function, x: Tensor, index: Tensor, num_experts: int, grad: Tensor):
    x = x.detach().requires_grad_()
    outputs = function(x, index, num_experts)
    return tuple(t.detach() for t in outputs), torch.autograd.grad(outputs[0], x, grad)


def check_unpermute(y: Tensor, source: Tensor, weights: Tensor | None, top_k: int, grad: Tensor) -> None:
    inputs = (y,) if weights is None else (y, weights)

    def function(y: Tensor, weights: Tensor | None = None) -> Tensor:
        return moe_unpermute(y, source, weights, top_k=top_k)

    def definition(y: Tensor, weights: Tensor | None = None) -> Tensor:
        return reference.moe_unpermute(y, source, weights, top_k=top_k)

    (out,), grads = gradients(function, inputs, (grad,))
    (expected,), expected_grads = in_double(definition, inputs, (grad,))
    (size,), size_grads = in_double(definition, [t.abs() for t in inputs], (grad.abs(),))
    assert_close(out, expected, "out", scale=size.max().item())
    for name, a, b, s in zip(("grad_y", "grad_weights"), grads, expected_grads, size_grads, strict=False):
        assert_close(a, b, name, scale=s.max().item())


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k", "num_experts"),
    [(1, 1, 1, 1), (7, 20, 2, 4), (40, 129, 8, 5), (64, 32, 3, 100), (300, 256, 4, 16)],
    ids=str,
)
def test_values_and_gradients(dtype, tokens: int, hidden: int, top_k: int, num_experts: int) -> None:
    torch.manual_seed(0)
    x, rows, grad_rows = torch.randn(tokens, hidden), *torch.randn(2, tokens * top_k, hidden)
    index = torch.randint(-1, num_experts + 2, (tokens, top_k))  # some are skipped
    check_permute(x.to(dtype), index, num_experts, grad_rows.to(dtype))
    _, _, source = moe_permute(x, index, num_experts)
    for weights in (torch.rand(tokens, top_k), torch.rand(tokens, top_k).to(dtype), None):
        check_unpermute(rows.to(dtype), source, weights, top_k, x.to(dtype))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from(KERNEL_DTYPES),
    st.sampled_from([torch.int32, torch.int64]),
    st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 4),
)
def test_any_call(tokens, hidden, top_k, num_experts, dtype, index_dtype, layouts) -> None:
    torch.manual_seed(hidden)
    x_layout, grad_layout, y_layout, weights_layout = (LAYOUTS[name] for name in layouts)
    x, rows, grad_rows = (t.to(dtype) for t in (torch.randn(tokens, hidden), *torch.randn(2, tokens * top_k, hidden)))
    index = torch.randint(-2, num_experts + 2, (tokens, top_k), dtype=index_dtype)
    check_permute(x_layout(x), index.t().contiguous().t(), num_experts, grad_layout(grad_rows))
    _, _, source = moe_permute(x, index, num_experts)
    check_unpermute(y_layout(rows), source, weights_layout(torch.rand(tokens, top_k)), top_k, grad_layout(x))


def test_order_is_stable() -> None:
    index = torch.tensor([[1, 0], [0, 7], [1, -1], [0, 1]])
    x = torch.arange(4.0).unsqueeze(1)
    x_sorted, offsets, source = moe_permute(x, index, 3)
    assert source.tolist() == [1, 2, 6, 0, 4, 7, -1, -1]
    assert offsets.tolist() == [3, 6, 6]
    assert x_sorted.flatten().tolist() == [0, 1, 3, 0, 2, 3, 0, 0]


def test_every_expert_elsewhere() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    x_sorted, offsets, source = moe_permute(x, torch.full((3, 2), 9), 2)
    weights = torch.rand(3, 2, requires_grad=True)
    out = moe_unpermute(x_sorted, source, weights)
    assert not x_sorted.any()
    assert not offsets.any()
    assert not out.any()
    out.sum().backward()
    assert not x.grad.any()
    assert not weights.grad.any()


def test_skipped_rows_may_hold_anything() -> None:
    source = torch.tensor([2, 0, -1, -1])
    y = torch.tensor([[1.0], [2.0], [torch.nan], [torch.inf]], requires_grad=True)
    weights = torch.tensor([[0.5, torch.nan], [2.0, torch.nan]], requires_grad=True)
    out = moe_unpermute(y, source, weights)
    assert out.flatten().tolist() == [1.0, 2.0]
    out.sum().backward()
    assert y.grad.flatten().tolist() == [2.0, 0.5, 0.0, 0.0]
    assert weights.grad.tolist() == [[2.0, 0.0], [1.0, 0.0]]


def test_round_trip() -> None:
    torch.manual_seed(1)
    x = torch.randn(50, 33).bfloat16()
    x_sorted, _, source = moe_permute(x, torch.randint(0, 8, (50, 4)), 8)
    assert torch.equal(moe_unpermute(x_sorted, source, torch.full((50, 4), 0.25)), x)


def test_expanded_gradient() -> None:
    torch.manual_seed(2)
    x, index = torch.randn(5, 9), torch.randint(0, 3, (5, 2))
    check_permute(x, index, 3, torch.ones(()).expand(10, 9))
    _, _, source = moe_permute(x, index, 3)
    check_unpermute(torch.randn(10, 9), source, torch.rand(5, 2), 2, torch.ones(()).expand(5, 9))


@pytest.mark.parametrize(("tokens", "hidden", "num_experts"), [(0, 8, 3), (4, 0, 3), (0, 8, 0)], ids=str)
def test_zero_sizes(tokens: int, hidden: int, num_experts: int) -> None:
    x, weights = torch.randn(tokens, hidden, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
    x_sorted, offsets, source = moe_permute(x, torch.zeros(tokens, 2, dtype=torch.int64), num_experts)
    assert x_sorted.shape == (2 * tokens, hidden)
    assert offsets.shape == (num_experts,)
    moe_unpermute(x_sorted, source, weights).sum().backward()
    assert x.grad.shape == x.shape
    assert weights.grad.shape == weights.shape


def test_thread_count_does_not_show() -> None:
    torch.manual_seed(3)
    x, index, weights = torch.randn(500, 129), torch.randint(0, 9, (500, 4)), torch.rand(500, 4)

    def step():
        x_sorted, offsets, source = moe_permute(x, index, 9)
        outputs, grads = gradients(lambda y, w: moe_unpermute(y, source, w), (x_sorted, weights), (x,))
        return x_sorted, offsets, source, *outputs, *grads

    results = on_threads((1, 2, 3), step)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_larger_than_the_cache() -> None:
    torch.manual_seed(4)
    x, index, weights = torch.randn(4096, 2048), torch.randint(0, 5, (4096, 2)), torch.rand(4096, 2)
    x_sorted, _, source = moe_permute(x, index, 4)
    assert torch.equal(x_sorted, reference.moe_permute(x, index, 4)[0])
    out, grad = moe_unpermute(x_sorted, source, weights), torch.ops.mindspeed.moe_unpermute_backward
    local = (index < 4) * weights
    torch.testing.assert_close(out, x * local.sum(1, keepdim=True))
    grad_y, _ = grad(x, x_sorted, source, weights, 2)
    assert torch.equal(grad_y, x_sorted * (weights.flatten()[source.clamp(min=0)] * (source >= 0)).unsqueeze(1))


@pytest.mark.parametrize("with_weights", [True, False])
def test_second_derivative(with_weights: bool) -> None:
    torch.manual_seed(5)
    x, weights, index = torch.randn(4, 6), torch.rand(4, 2), torch.randint(0, 4, (4, 2))

    def layer(permute: Callable[..., Any], unpermute: Callable[..., Any], x: Tensor, *weights: Tensor) -> Tensor:
        x_sorted, _, source = permute(x, index, 3)
        return unpermute(x_sorted.pow(2), source, *(weights or (None,)), top_k=2)

    check_second_derivative(
        partial(layer, moe_permute, moe_unpermute),
        partial(layer, reference.moe_permute, reference.moe_unpermute),
        (x, weights) if with_weights else (x,),
    )


def test_backward_operator_cannot_be_differentiated_silently() -> None:
    grad = torch.randn(3, 8, requires_grad=True)
    grad_y, _ = torch.ops.mindspeed.moe_unpermute_backward(grad, None, torch.arange(6), None, 2)
    with pytest.raises(RuntimeError, match="moe_unpermute_backward has no derivative"):
        grad_y.sum().backward()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: moe_permute(torch.ones(3, 4), torch.zeros(2, 2).long(), 2), ["x [3, 4]", "expert_index [2, 2]"]),
        (lambda: moe_permute(torch.ones(3, 4), torch.zeros(3, 2), 2), ["expert_index", "int32 or int64", "Float"]),
        (lambda: moe_permute(torch.ones(3, 4), torch.zeros(3, 65).long(), 2), ["top_k", "64", "65"]),
        (lambda: moe_unpermute(torch.ones(6, 4), torch.arange(5), torch.ones(3, 2)), ["y_sorted [6, 4]", "source [5]"]),
        (lambda: moe_unpermute(torch.ones(6, 4), torch.arange(6), torch.ones(2, 2)), ["weights", "[3, 2]", "[2, 2]"]),
        (lambda: moe_unpermute(torch.ones(2, 4), torch.tensor([0, 0]), torch.ones(1, 2)), ["assignment 0 twice"]),
        (lambda: moe_unpermute(torch.ones(2, 4), torch.tensor([0, 2]), torch.ones(1, 2)), ["source[1]", "2"]),
    ],
    ids=["tokens", "index-dtype", "top-k", "rows", "weights", "twice", "beyond"],
)
def test_errors_name_the_arguments(call, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        call()
    assert all(part in str(error.value) for part in ("permute", *named)), error.value
