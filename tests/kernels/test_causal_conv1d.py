"""causal_conv1d against its definition: values, gradients, layouts, packed sequences, edge cases, errors."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import causal_conv1d, reference
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None, grad_layout: str = "contiguous", **options) -> None:
    """Values and gradients of one call."""
    grad = LAYOUTS[grad_layout](torch.randn_like(x))
    inputs = (x, weight) if bias is None else (x, weight, bias)
    (y,), grads = gradients(partial(causal_conv1d, **options), inputs, (grad,))
    (expected,), expected_grads = in_double(partial(reference.causal_conv1d, **options), inputs, (grad,))
    terms = x.double().abs().amax().item() * weight.double().abs().sum(-1).amax().item() + 1.0 if x.numel() else 1.0
    assert_close(y, expected, "y", scale=terms)
    grad_terms = grad.double().abs().amax().item() * (1 + terms) if x.numel() else 1.0
    assert_close(grads[0], expected_grads[0], "grad_x", scale=grad_terms * weight.double().abs().sum(-1).amax().item())
    for name, actual, wanted in zip(("grad_weight", "grad_bias"), grads[1:], expected_grads[1:], strict=False):
        share = grad_terms * max(x.double().abs().amax().item(), 1.0) if x.numel() else 1.0
        assert_close(actual, wanted, name, scale=share * max(1, x[..., 0].numel()) ** 0.5)


def inputs(batch: int, seq: int, channels: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = torch.randn(batch, seq, channels), torch.randn(channels, width) / width**0.5, torch.randn(channels)
    return [t.to(dtype) for t in tensors]


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "width"), [((1, 1, 1), 4), ((2, 3, 5), 4), ((1, 130, 33), 4), ((3, 70, 520), 3), ((2, 5, 17), 1)]
)
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], width: int, activation: str | None) -> None:
    torch.manual_seed(0)
    check(*inputs(*shape, width, dtype), activation=activation)


def test_equals_convolution_in_pytorch() -> None:
    torch.manual_seed(1)
    x, weight, bias = inputs(2, 9, 6, 4)
    padded = F.conv1d(x.transpose(1, 2).double(), weight.unsqueeze(1).double(), bias.double(), padding=3, groups=6)
    expected = F.silu(padded[..., :9]).transpose(1, 2)
    assert_close(causal_conv1d(x, weight, bias), expected, "y")


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(1, 40)),
    st.integers(1, 6),
    st.sampled_from(KERNEL_DTYPES),
    *[st.sampled_from(sorted(LAYOUTS))] * 2,
    st.booleans(),
    st.data(),
)
def test_any_call(shape, width, dtype, x_layout, grad_layout, packed, data) -> None:
    torch.manual_seed(width)
    x, weight, bias = inputs(*shape, width, dtype)
    tokens = shape[0] * shape[1]
    ends = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=2, max_size=5))) if packed else None
    assume(ends is None or ends[0] < ends[-1])
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    check(LAYOUTS[x_layout](x), weight, bias, grad_layout, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_packed_sequences_are_strangers(dtype: torch.dtype) -> None:
    """Each packed sequence comes out, forward and backward, as it does alone, whatever its neighbours hold."""
    torch.manual_seed(2)
    x, weight, bias = inputs(1, 300, 9, 4, dtype)
    grad = torch.randn_like(x)
    ends = [2, 3, 3, 101, 290]
    x[:, :2], x[:, 290:] = torch.nan, torch.inf  # in no sequence
    (y,), (grad_x, *_) = gradients(partial(causal_conv1d, cu_seqlens=torch.tensor(ends)), (x, weight, bias), (grad,))
    assert not y[:, [0, 1, 290, 299]].any()
    assert not grad_x[:, [0, 1, 290, 299]].any()
    for a, b in itertools.pairwise(ends):
        (alone,), (grad_alone, *_) = gradients(causal_conv1d, (x[:, a:b], weight, bias), (grad[:, a:b],))
        assert torch.equal(y[:, a:b], alone)
        assert torch.equal(grad_x[:, a:b], grad_alone)


@pytest.mark.parametrize("weight_dtype", KERNEL_DTYPES, ids=str)
def test_weight_of_another_dtype(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight, bias = inputs(2, 7, 12, 4)
    check(x.bfloat16(), weight.to(weight_dtype), bias.to(weight_dtype))
    check(x.bfloat16(), weight.to(weight_dtype))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
def test_zero_sizes(shape: tuple[int, ...]) -> None:
    leaves = [t.requires_grad_() for t in inputs(*shape, 4)]
    causal_conv1d(*leaves).sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in leaves)


def test_thread_count_does_not_show() -> None:
    torch.manual_seed(4)
    arguments = inputs(1, 700, 530, 4)
    results = on_threads((1, 2, 3), lambda: gradients(causal_conv1d, arguments, (arguments[0],)))
    for outputs, grads in results[1:]:
        assert all(map(torch.equal, outputs + grads, results[0][0] + results[0][1]))


def test_second_derivative() -> None:
    torch.manual_seed(5)
    check_second_derivative(causal_conv1d, reference.causal_conv1d, inputs(2, 5, 3, 4))


def test_reference_gradient() -> None:
    torch.manual_seed(6)
    leaves = [t.double().requires_grad_() for t in inputs(1, 6, 3, 4)]
    function = partial(causal_conv1d, cu_seqlens=torch.tensor([1, 3, 6]))  # float64 runs the definition
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (((2, 8), (8, 4)), ["x", "[2, 8]"]),
        (((2, 3, 8), (7, 4)), ["weight", "[2, 3, 8]", "[7, 4]"]),
        (((2, 3, 8), (8, 4), (7,)), ["bias", "[8]", "[7]"]),
    ],
    ids=["x", "weight", "bias"],
)
def test_errors_name_the_arguments(dtype: torch.dtype, shapes, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        causal_conv1d(*(torch.ones(shape, dtype=dtype) for shape in shapes))
    assert all(part in str(error.value) for part in ("causal_conv1d", *named)), error.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ends", [[0, 7], [-1, 6], [4, 2]])
def test_sequences_must_lie_within_the_tokens(dtype: torch.dtype, ends: list[int]) -> None:
    with pytest.raises(RuntimeError, match="cu_seqlens must ascend within the 6 tokens"):
        causal_conv1d(torch.ones(2, 3, 8, dtype=dtype), torch.ones(8, 4, dtype=dtype), cu_seqlens=torch.tensor(ends))


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="'gelu', but must be"):
        causal_conv1d(torch.ones(1, 2, 8), torch.ones(8, 4), activation="gelu")
