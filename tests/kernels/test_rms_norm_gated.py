"""rms_norm_gated against its definition: values, gradients, layouts, edge cases, errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import reference, rms_norm_gated
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)


def check(x: Tensor, gate: Tensor, weight: Tensor, grad_layout: str = "contiguous", **options) -> None:
    """Values and gradients of one call."""
    grad = LAYOUTS[grad_layout](torch.randn_like(x))
    inputs = (x, gate, weight)
    (y,), grads = gradients(partial(rms_norm_gated, **options), inputs, (grad,))
    (expected,), expected_grads = in_double(partial(reference.rms_norm_gated, **options), inputs, (grad,))
    assert_close(y, expected, "y")
    # Terms that cancel in grad_x and add up in grad_weight.
    factor = torch.nn.functional.silu(gate.double()) if options.get("activation") != "sigmoid" else gate.sigmoid()
    share = (grad.double() * factor).abs()
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + options.get("eps", 1e-6))
    grad_x_scale = (share * weight.double().abs() * rstd).amax().item() if x.numel() else 0.0
    weight_scale = (share * (x.double() * rstd).abs()).flatten(0, -2).sum(0).amax().item() if x.numel() else 0.0
    assert_close(grads[0], expected_grads[0], "grad_x", scale=4 * grad_x_scale)
    assert_close(grads[1], expected_grads[1], "grad_gate")
    assert_close(grads[2], expected_grads[2], "grad_weight", scale=weight_scale)


def inputs(*shape: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    x, gate = torch.randn(2, *shape)
    return x.to(dtype), (3 * gate).to(dtype), (0.5 + torch.rand(shape[-1])).to(weight_dtype or dtype)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (3, 5, 17), (2, 3, 4, 128), (70, 130), (1100, 16)])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], activation: str) -> None:
    torch.manual_seed(0)
    check(*inputs(*shape, dtype=dtype), activation=activation, eps=1e-3)


@pytest.mark.parametrize("weight_dtype", KERNEL_DTYPES, ids=str)
def test_weight_of_another_dtype(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(*inputs(9, 40, dtype=torch.bfloat16, weight_dtype=weight_dtype))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 70),
    st.sampled_from(KERNEL_DTYPES),
    *[st.sampled_from(sorted(LAYOUTS))] * 3,
)
def test_any_call(leading, hidden, dtype, x_layout, gate_layout, grad_layout) -> None:
    torch.manual_seed(hidden)
    x, gate, weight = inputs(*leading, hidden, dtype=dtype)
    check(LAYOUTS[x_layout](x), LAYOUTS[gate_layout](gate), weight, grad_layout)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_zero_sizes(shape: tuple[int, ...]) -> None:
    x, gate, weight = (t.requires_grad_() for t in inputs(*shape, dtype=torch.float32))
    rms_norm_gated(x, gate, weight).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(8))


def test_rows_of_zeros_and_saturated_gates() -> None:
    x, gate = torch.zeros(2, 4), torch.tensor([[-torch.inf, -200.0, 0.0, 200.0]]).expand(2, 4)
    y = rms_norm_gated(torch.ones_like(x), gate, torch.ones(4), activation="sigmoid")
    assert_close(y[0], torch.tensor([0.0, 0.0, 0.5, 1.0], dtype=torch.float64) * (1 + 1e-6) ** -0.5, "y")
    assert torch.equal(rms_norm_gated(x, gate.clamp(-9, 9), torch.ones(4)), x)


def test_thread_count_does_not_show() -> None:
    torch.manual_seed(3)
    arguments = inputs(3000, 65, dtype=torch.float32)
    results = on_threads((1, 2, 3), lambda: gradients(rms_norm_gated, arguments, (arguments[1],)))
    for outputs, grads in results[1:]:
        assert all(map(torch.equal, outputs + grads, results[0][0] + results[0][1]))


def test_second_derivative() -> None:
    torch.manual_seed(5)
    check_second_derivative(rms_norm_gated, reference.rms_norm_gated, inputs(3, 6, dtype=torch.float32))


def test_reference_gradient() -> None:
    torch.manual_seed(6)
    x, gate, weight = (t.double().requires_grad_() for t in inputs(3, 5, dtype=torch.float32))
    for activation in ("silu", "sigmoid"):
        function = partial(rms_norm_gated, activation=activation)  # float64 runs the definition
        assert torch.autograd.gradcheck(function, (x, gate, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shapes", "named"),
    [(((2, 8), (2, 7), (8,)), ["gate", "[2, 8]", "[2, 7]"]), (((2, 8), (2, 8), (7,)), ["weight", "[8]", "[7]"])],
    ids=["gate", "weight"],
)
def test_errors_name_the_arguments(dtype: torch.dtype, shapes, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        rms_norm_gated(*(torch.ones(shape, dtype=dtype) for shape in shapes))
    assert all(part in str(error.value) for part in ("rms_norm_gated", *named)), error.value


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="'gelu', but must be one of silu, sigmoid"):
        rms_norm_gated(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), activation="gelu")
