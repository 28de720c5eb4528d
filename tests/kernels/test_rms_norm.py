"""rms_norm against its definition: values, gradients, layouts, edge cases, errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import reference, rms_norm
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)

VARIANTS = [
    pytest.param(False, "hf", id="hf"),
    pytest.param(False, "float32", id="float32-order"),
    pytest.param(True, "float32", id="zero-centered"),
    pytest.param(True, "hf", id="zero-centered-hf"),
]


def check(x: Tensor, weight: Tensor | None, residual: Tensor | None, layout: str = "contiguous", **options) -> None:
    """Values and all gradients of one call."""
    arrange = LAYOUTS[layout]
    inputs = [arrange(x)] + ([] if weight is None else [weight]) + ([] if residual is None else [arrange(residual)])

    def call(function, add_function, x: Tensor, *rest: Tensor):
        rest_list = list(rest)
        w = rest_list.pop(0) if weight is not None else None
        if residual is None:
            return function(x, w, **options)
        return add_function(x, rest_list.pop(0), w, **options)

    kernel = partial(call, rms_norm, lambda x, r, w, **o: rms_norm(x, w, residual=r, **o))
    definition = partial(call, reference.rms_norm, reference.add_rms_norm)

    outputs = kernel(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [arrange(torch.randn_like(o)) for o in outputs]
    actual, actual_grads = gradients(kernel, inputs, grads)
    if residual is None:
        expected, expected_grads = in_double(definition, inputs, grads)
    else:  # the definition rounds the sum, so that float64 must start from the rounded one
        total = (x + residual).detach()
        torch.testing.assert_close(actual[1], total, rtol=0, atol=0)
        start = [total] + ([] if weight is None else [weight])

        def from_sum(total: Tensor, *w: Tensor):
            return reference.rms_norm(total, *w, **options), total * 1

        expected, expected_grads = in_double(from_sum, start, grads)
        expected_grads = (*expected_grads, expected_grads[0])

    assert_close(actual[0], expected[0], "y", roundings=2)
    scale_x, scale_weight = sizes_of_terms(x, weight, residual, grads, **options)
    assert_close(actual_grads[0], expected_grads[0], "grad_x", scale=scale_x)
    if weight is not None:
        rounds_terms = x.dtype != torch.float32 and options.get("cast_order", "hf") == "hf"
        assert_close(actual_grads[1], expected_grads[1], "grad_weight", scale=scale_weight, terms=rounds_terms)
    if residual is not None:
        assert torch.equal(actual_grads[-1], actual_grads[0])


def sizes_of_terms(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    grads: Sequence[Tensor],
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    cast_order: str = "hf",
) -> tuple[float, float]:
    """The largest of grad_y · weight · rstd and grad_sum, which cancel in grad_x, and of sum(|grad_y · x̂|)."""
    total = x.double() if residual is None else x.double() + residual.double()
    rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    factor = 1.0 if weight is None else weight.double() + (1.0 if zero_centered else 0.0)
    terms_of_x = (grads[0] * factor * rstd).abs().max() + sum(g.abs().max() for g in grads[1:])
    terms_of_weight = (grads[0] * total * rstd).abs().reshape(-1, x.shape[-1]).sum(0).max()
    return float(terms_of_x), float(terms_of_weight)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(13,), (1, 1), (7, 3), (3, 5, 17), (2, 3, 4, 64), (5, 130), (70, 33), (2, 1000), (1, 4096)]
)
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    for residual_or_none in (None, residual):
        check(x, weight, residual_or_none)
        check(x, None, residual_or_none)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("zero_centered", "cast_order"), VARIANTS)
def test_variants(dtype: torch.dtype, zero_centered: bool, cast_order: str) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(6, 5, 48).to(dtype), torch.randn(48).to(dtype)
    check(x, weight, None, zero_centered=zero_centered, cast_order=cast_order, eps=1e-3)
    check(x, weight, x.flip(0), zero_centered=zero_centered, cast_order=cast_order, eps=1e-3)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(3, 4, 5, 24).to(dtype), torch.randn(48).to(dtype)[::2]
    check(x, weight, None, layout)
    check(x, weight, x.flip(0), layout)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 70),
    st.sampled_from(KERNEL_DTYPES),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.sampled_from(["hf", "float32"]),
    st.booleans(),
)
def test_any_call(leading, hidden, dtype, layout, zero_centered, cast_order, has_residual) -> None:
    torch.manual_seed(hidden)
    x, weight = torch.randn(*leading, hidden).to(dtype), torch.randn(hidden).to(dtype)
    check(x, weight, x.flip(0) if has_residual else None, layout, zero_centered=zero_centered, cast_order=cast_order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast_order", ["hf", "float32"])
def test_rounds_where_the_cast_order_says(dtype: torch.dtype, cast_order: str) -> None:
    """The two orders differ in a quarter of the elements: the kernel must follow the one asked for, bit for bit."""
    torch.manual_seed(3)
    x, weight = torch.randn(64, 512).to(dtype), torch.randn(512).to(dtype)
    other = {"hf": "float32", "float32": "hf"}[cast_order]

    def share_of_different(order: str) -> float:
        return (
            (rms_norm(x, weight, cast_order=cast_order) != reference.rms_norm(x, weight, cast_order=order))
            .float()
            .mean()
            .item()
        )

    assert share_of_different(cast_order) < 0.005  # sums in another order move a rounding now and then
    assert share_of_different(other) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wider_weight(dtype: torch.dtype) -> None:
    """As in PyTorch, half-precision x̂ times a float32 weight is float32; the all-float32 order returns x's dtype."""
    torch.manual_seed(4)
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(40)
    for cast_order, out in (("hf", torch.float32), ("float32", dtype)):
        y = rms_norm(x, weight, cast_order=cast_order)
        assert y.dtype == out == reference.rms_norm(x, weight, cast_order=cast_order).dtype
        grad = torch.randn_like(y)
        _, (grad_x, grad_weight) = gradients(partial(rms_norm, cast_order=cast_order), (x, weight), (grad,))
        _, expected = in_double(partial(reference.rms_norm, cast_order=cast_order), (x, weight), (grad,))
        scale_x, scale_weight = sizes_of_terms(x, weight, None, (grad,))
        assert (grad_x.dtype, grad_weight.dtype) == (dtype, torch.float32)
        assert_close(grad_x, expected[0], "grad_x", scale=scale_x)
        assert_close(grad_weight.to(dtype), expected[1], "grad_weight", scale=scale_weight, terms=True)


def test_expanded_gradient() -> None:
    """sum().backward() hands a gradient with one element of storage and strides of 0."""
    torch.manual_seed(5)
    x, weight = torch.randn(6, 20, requires_grad=True), torch.randn(20, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    expected = in_double(reference.rms_norm, (x, weight), (torch.ones(6, 20),))[1]
    assert_close(x.grad, expected[0], "grad_x")
    assert_close(weight.grad, expected[1], "grad_weight")


def test_expanded_rows() -> None:
    torch.manual_seed(6)
    check(torch.randn(1, 24).expand(5, 24), torch.randn(24), None)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_zero_sizes(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y, total = rms_norm(x, weight, residual=x)
    (y.sum() + total.sum()).backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(shape[-1]))


def test_only_the_sum_is_used() -> None:
    x, residual = torch.randn(2, 3, 8, requires_grad=True).unbind(0)
    _, total = rms_norm(x, torch.ones(8), residual=residual)
    grad_x, grad_residual = torch.autograd.grad(total.sum(), (x, residual))
    assert torch.equal(grad_x, torch.ones(3, 8))
    assert torch.equal(grad_residual, torch.ones(3, 8))


def test_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_thread_count_does_not_show() -> None:
    torch.manual_seed(7)
    x, grad, weight = torch.randn(1100, 129), torch.randn(1100, 129), torch.randn(129)
    results = on_threads((1, 2, 3), lambda: gradients(rms_norm, (x, weight), (grad,)))
    for outputs, grads in results[1:]:
        assert all(map(torch.equal, outputs + grads, results[0][0] + results[0][1]))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_larger_than_the_cache(dtype: torch.dtype) -> None:
    """Large outputs are written past the cache: another instruction, the same numbers as in small pieces."""
    torch.manual_seed(8)
    x, weight = torch.randn(8192, 2048).to(dtype), torch.randn(2048).to(dtype)
    y = rms_norm(x, weight)
    pieces = torch.cat([rms_norm(piece, weight) for piece in x.split(512)])
    assert torch.equal(y, pieces)
    rstd, grad = torch.rand(8192), torch.randn_like(x)
    whole, _ = torch.ops.mindspeed.rms_norm_backward(grad, None, x, weight, rstd, False, True, False)
    pieces = [
        torch.ops.mindspeed.rms_norm_backward(g, None, p, weight, r, False, True, False)[0]
        for g, p, r in zip(grad.split(512), x.split(512), rstd.split(512), strict=True)
    ]
    assert torch.equal(whole, torch.cat(pieces))


def test_second_derivative() -> None:
    torch.manual_seed(9)
    check_second_derivative(rms_norm, reference.rms_norm, (torch.randn(3, 6), torch.randn(6)))


def test_second_derivative_with_residual() -> None:
    torch.manual_seed(10)
    x, residual, weight = torch.randn(3, 6), torch.randn(3, 6), torch.randn(6)
    check_second_derivative(lambda x, r, w: rms_norm(x, w, residual=r), reference.add_rms_norm, (x, residual, weight))


def test_backward_operator_cannot_be_differentiated_silently() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    _, rstd = torch.ops.mindspeed.rms_norm(x, None, 1e-6, False, True)
    grad, _ = torch.ops.mindspeed.rms_norm_backward(x, None, x, None, rstd, False, True, False)
    with pytest.raises(RuntimeError, match="rms_norm_backward has no derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("device_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (lambda d: (torch.ones(2, 8, dtype=d), torch.ones(7, dtype=d)), ["weight", "[8]", "[2, 8]", "[7]"]),
        (lambda d: (torch.ones(2, 8, dtype=d), torch.ones(1, dtype=d)), ["weight", "[8]", "[1]"]),
        (lambda d: (torch.ones(2, 8, dtype=d), None, torch.ones(2, 1, dtype=d)), ["residual", "x", "[2, 8]", "[2, 1]"]),
        (lambda d: (torch.ones(2, 8, dtype=d), None, torch.ones(2, 8, dtype=torch.float16)), ["residual", "x", "Half"]),
    ],
    ids=["weight-shape", "weight-broadcast", "residual-shape", "residual-dtype"],
)
def test_errors_name_the_arguments(device_dtype: torch.dtype, arguments, named: list[str]) -> None:
    x, weight, *residual = arguments(device_dtype)
    with pytest.raises(RuntimeError) as error:
        rms_norm(x, weight, residual=residual[0] if residual else None)
    message = str(error.value).replace("torch.float16", "Half")
    assert all(part in message for part in ("rms_norm", *named)), message


def test_unknown_cast_order() -> None:
    with pytest.raises(ValueError, match="cast_order"):
        rms_norm(torch.ones(2, 8), cast_order="bf16")  # type: ignore[call-overload]


def test_operator_names_a_dtype_without_kernel() -> None:
    with pytest.raises(RuntimeError, match=r"rms_norm: x must be float32, bfloat16 or float16, but is Double"):
        torch.ops.mindspeed.rms_norm(torch.ones(2, 8, dtype=torch.float64), None, 1e-6, False, True)


def test_float64_is_exact() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(rms_norm(x), reference.rms_norm(x))


@pytest.mark.large
def test_more_elements_than_int32_counts() -> None:
    """Rows beyond 2^31 elements; the input is one expanded row, so that only the output takes memory."""
    hidden = 2**15
    x = torch.randn(1, hidden).bfloat16().expand(2**16 + 8, hidden)
    y = rms_norm(x)
    expected = rms_norm(x[:1])[0]
    for row in (0, 2**15, 2**16 - 1, 2**16, -1):
        assert torch.equal(y[row], expected)
