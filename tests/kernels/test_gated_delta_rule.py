"""gated_delta_rule against its definition: values, gradients, states, packed sequences, layouts, edge cases, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import gated_delta_rule, reference
from tests.kernels.compare import KERNEL_DTYPES, LAYOUTS, assert_close, check_second_derivative, gradients, on_threads

PER_CHANNEL = pytest.mark.parametrize("per_channel", [False, True], ids=["per_head", "per_channel"])
NAMES = ("grad_q", "grad_k", "grad_v", "grad_g", "grad_beta", "grad_initial_state")


def inputs(
    batch: int,
    seq: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    decay: float = 0.5,
    per_channel: bool = False,
) -> list[Tensor]:
    """q, k, v, g, beta as models have them: decays in float32, beta in the dtype of the others."""
    q, k = torch.randn(2, batch, seq, key_heads, key_dim)
    v, beta = torch.randn(batch, seq, value_heads, value_dim), torch.rand(batch, seq, value_heads)
    g = -decay * torch.rand(batch, seq, value_heads, *([key_dim] if per_channel else []))
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype)]


def call(function, *tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The arguments may have an initial state as the last one."""
    initial_state = tensors[5] if len(tensors) > 5 else None
    return function(*tensors[:5], initial_state=initial_state, return_final_state=True, **options)


def check(arguments: list[Tensor], layout: str = "contiguous", *, qk_l2norm: bool = True, **options) -> None:
    """Values and gradients of one call."""
    out, final_state = call(gated_delta_rule, *arguments, qk_l2norm=qk_l2norm, **options)
    assert (out.dtype, final_state.dtype) == (arguments[2].dtype, torch.float32)
    grads = LAYOUTS[layout](torch.randn_like(out)), torch.randn_like(final_state)
    function = partial(call, gated_delta_rule, qk_l2norm=qk_l2norm, **options)
    actual, actual_grads = gradients(function, arguments, grads)

    leaves = [t.detach().double().requires_grad_() for t in arguments]
    norms = [(t.square().sum(-1, keepdim=True) + 1e-6).sqrt() if qk_l2norm else torch.ones(()) for t in leaves[:2]]
    normalized = [t / norm for t, norm in zip(leaves[:2], norms, strict=True)]
    expected = call(reference.gated_delta_rule, *normalized, *leaves[2:], **options)
    expected_grads = torch.autograd.grad(expected, (*leaves, *normalized), [g.double() for g in grads])
    # The terms of an element are of the size of the inputs, about 1, or several times as large as the largest element,
    # and pass through many tokens. The part of a gradient along q or k is taken out, and may be most of it.
    names, expected = ("out", "final_state", *NAMES), (*expected, *expected_grads[: len(leaves)])
    sizes = [max(1.0, t.abs().amax().item()) if t.numel() else 1.0 for t in expected]
    for i, (grad, norm) in enumerate(zip(expected_grads[len(leaves) :], norms, strict=True), start=2):
        sizes[i] = max(sizes[i], (grad / norm).abs().amax().item()) if grad.numel() else 1.0
    for name, a, e, size in zip(names, (*actual, *actual_grads), expected, sizes, strict=False):
        assert_close(a, e.detach(), name, scale=8 * size)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1, 1, 1), (2, 5, 1, 2, 8, 8), (1, 64, 1, 1, 16, 16), (1, 150, 2, 2, 33, 20), (1, 70, 1, 1, 128, 128)],
    ids=str,
)
@PER_CHANNEL
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], per_channel: bool) -> None:
    torch.manual_seed(0)
    check(inputs(*shape, dtype, per_channel=per_channel))


@PER_CHANNEL
def test_more_tokens_than_between_two_checkpoints(per_channel: bool) -> None:
    torch.manual_seed(1)
    arguments = inputs(1, 1100, 1, 1, 5, 3, decay=0.1, per_channel=per_channel)
    check([*arguments, torch.randn(1, 1, 5, 3)])


@pytest.mark.parametrize("qk_l2norm", [False, True])
@PER_CHANNEL
def test_scale_and_initial_state(qk_l2norm: bool, per_channel: bool) -> None:
    torch.manual_seed(2)
    q, k, *rest = inputs(2, 70, 2, 4, 12, 9, per_channel=per_channel)
    check([q, k / 12**0.5, *rest, torch.randn(2, 4, 12, 9)], scale=1.7, qk_l2norm=qk_l2norm)


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 140), st.integers(1, 2)),
    st.integers(1, 3),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(KERNEL_DTYPES),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_call(shape, group, dims, dtype, layout, grad_layout, packed, per_channel, data) -> None:
    torch.manual_seed(dims[0])
    batch, seq, heads = shape
    arguments = [
        LAYOUTS[layout](t) for t in inputs(batch, seq, heads, group * heads, *dims, dtype, per_channel=per_channel)
    ]
    ends = sorted(data.draw(st.lists(st.integers(0, batch * seq), min_size=2, max_size=5))) if packed else None
    assume(ends is None or ends[0] < ends[-1])
    initial = torch.randn(batch if ends is None else len(ends) - 1, group * heads, *dims)
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    check([*arguments, LAYOUTS[layout](initial)], grad_layout, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("decay", [0.0, 5.0, 300.0])
@PER_CHANNEL
def test_decays_of_all_sizes(decay: float, per_channel: bool) -> None:
    """From no decay, where the state remembers everything, to one that forgets from token to token."""
    torch.manual_seed(3)
    check(inputs(1, 200, 1, 1, 16, 16, decay=decay, per_channel=per_channel))


@pytest.mark.parametrize("last", [3, 31, 32])
@PER_CHANNEL
def test_a_long_decay_costs_no_precision(last: int, per_channel: bool) -> None:
    """The decay between two neighbours does not suffer from what has decayed before them, in whichever block of a
    chunk, nor from what decays in another channel."""
    torch.manual_seed(4)
    q, k, v, g, beta = inputs(1, 64, 1, 1, 8, 8, per_channel=per_channel)
    g = torch.where(torch.arange(64) == last, -3e4, -1e-3)[None, :, None]
    if per_channel:
        g = torch.where(torch.arange(8) % 3 == 1, g[..., None], -0.3)
    check([q, k, v, g, beta])


@pytest.mark.parametrize("decay", [1.0, 5.0])
@PER_CHANNEL
def test_errors_of_the_gradients_of_decays_do_not_add_up(decay: float, per_channel: bool) -> None:
    """A parameter of the decay sums them over all tokens. As differences of sums they would all be off the same way."""
    torch.manual_seed(15)
    arguments, grad = inputs(1, 128, 2, 2, 8, 8, decay=decay, per_channel=per_channel), torch.randn(1, 128, 2, 8)
    (_, actual), (_, expected) = (
        gradients(partial(f, qk_l2norm=True), tensors, (cotangent,))
        for f, tensors, cotangent in (
            (gated_delta_rule, arguments, grad),
            (reference.gated_delta_rule, [t.double() for t in arguments], grad.double()),
        )
    )
    assert_close(actual[3].sum(1), expected[3].sum(1), "grad_g", scale=expected[3].abs().amax().item())


def test_channels_of_all_decays() -> None:
    """Next to each other: e^(−90) to a token in one channel, of which the sums in a chunk would overflow, none in
    another."""
    torch.manual_seed(13)
    q, k, v, g, beta = inputs(1, 130, 1, 2, 20, 12, per_channel=True)
    check([q, k, v, g * torch.tensor([0.0, 1e-4, 1.0, 20.0, 180.0]).repeat(4), beta], qk_l2norm=True)


def test_equal_decays_of_all_channels_are_one_decay() -> None:
    torch.manual_seed(14)
    q, k, v, g, beta = inputs(1, 130, 2, 4, 20, 12)
    expected = gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
    actual = gated_delta_rule(q, k, v, g[..., None].expand(*g.shape, 20), beta, qk_l2norm=True)
    assert_close(actual, expected.double(), "out", scale=8 * expected.abs().amax().item())


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@PER_CHANNEL
def test_packed_sequences_are_strangers(dtype: torch.dtype, per_channel: bool) -> None:
    """Each packed sequence comes out, forward and backward, as it does alone, whatever its neighbours hold."""
    torch.manual_seed(5)
    arguments = inputs(1, 300, 1, 2, 16, 8, dtype, per_channel=per_channel)
    ends = [2, 3, 3, 101, 290]
    for t in arguments:
        t[:, :2], t[:, 290:] = torch.nan, torch.inf  # in no sequence
    grad = torch.randn(1, 300, 2, 8).to(dtype)
    function = partial(gated_delta_rule, qk_l2norm=True)
    (out,), grads = gradients(partial(function, cu_seqlens=torch.tensor(ends)), arguments, (grad,))
    for t in (out, *grads):
        assert not t[:, [0, 1, 290, 299]].any()
    for a, b in itertools.pairwise(ends):
        alone = gradients(function, [t[:, a:b] for t in arguments], (grad[:, a:b],))
        for t, expected in zip((out, *grads), (*alone[0], *alone[1]), strict=True):
            assert torch.equal(t[:, a:b], expected)


@PER_CHANNEL
def test_a_sequence_in_parts(per_channel: bool) -> None:
    """Passing states on, forward and backward, makes one sequence of its parts."""
    torch.manual_seed(6)
    arguments, grad = inputs(2, 150, 1, 2, 16, 8, per_channel=per_channel), torch.randn(2, 150, 2, 8)

    def in_parts(*tensors: Tensor) -> Tensor:
        state, outs = None, []
        for a, b in itertools.pairwise((0, 40, 105, 150)):
            out, state = gated_delta_rule(
                *(t[:, a:b] for t in tensors), qk_l2norm=True, initial_state=state, return_final_state=True
            )
            outs.append(out)
        return torch.cat(outs, 1)

    whole = gradients(partial(gated_delta_rule, qk_l2norm=True), arguments, (grad,))
    parts = gradients(in_parts, arguments, (grad,))
    for name, actual, expected in zip(("out", *NAMES), (*parts[0], *parts[1]), (*whole[0], *whole[1]), strict=False):
        assert_close(actual, expected.double(), name, scale=8 * expected.abs().amax().item())


@pytest.mark.parametrize("wanted", ["out", "final_state"])
def test_gradient_of_one_output(wanted: str) -> None:
    torch.manual_seed(7)
    arguments = inputs(1, 9, 1, 1, 4, 4)

    def call(function, *tensors: Tensor) -> Tensor:
        out, state = function(*tensors, return_final_state=True)
        return out if wanted == "out" else state

    grad = torch.randn_like(call(gated_delta_rule, *arguments))
    leaves = [t.requires_grad_() for t in arguments]
    actual = torch.autograd.grad(call(gated_delta_rule, *leaves), leaves, grad, allow_unused=True)
    double = [t.detach().double().requires_grad_() for t in arguments]
    outputs = call(reference.gated_delta_rule, *double)
    expected = torch.autograd.grad(outputs, double, grad.double(), allow_unused=True, materialize_grads=True)
    for name, a, e in zip(NAMES, actual, expected, strict=False):
        assert_close(a, e, name, scale=8 * e.abs().amax().item() + 1e-6)


@pytest.mark.parametrize("g_dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("beta_dtype", KERNEL_DTYPES, ids=str)
@PER_CHANNEL
def test_decay_and_beta_of_other_dtypes(g_dtype: torch.dtype, beta_dtype: torch.dtype, per_channel: bool) -> None:
    torch.manual_seed(8)
    q, k, v, g, beta = inputs(1, 20, 1, 1, 8, 8, torch.bfloat16, per_channel=per_channel)
    check([q, k, v, g.to(g_dtype), beta.to(beta_dtype), torch.randn(1, 1, 8, 8).to(g_dtype)])


@pytest.mark.parametrize(
    "shape",
    [(0, 3, 1, 1, 4, 4), (2, 0, 1, 2, 4, 4), (1, 3, 0, 0, 4, 4), (1, 3, 1, 1, 0, 4), (1, 3, 1, 1, 4, 0)],
    ids=str,
)
@PER_CHANNEL
def test_zero_sizes(shape: tuple[int, ...], per_channel: bool) -> None:
    arguments = inputs(*shape, per_channel=per_channel)
    initial = torch.ones(shape[0], shape[3], shape[4], shape[5])
    leaves = [t.requires_grad_() for t in (*arguments, initial)]
    out, state = gated_delta_rule(*leaves[:5], scale=1.0, initial_state=leaves[5], return_final_state=True)
    assert out.shape == arguments[2].shape
    (out.sum() + state.sum()).backward()
    assert all(t.grad.shape == t.shape for t in leaves)
    if shape[1] == 0:
        assert torch.equal(state, initial)
        assert torch.equal(initial.grad, torch.ones_like(initial))


@PER_CHANNEL
def test_thread_count_does_not_show(per_channel: bool) -> None:
    torch.manual_seed(9)
    arguments = inputs(2, 130, 3, 3, 16, 16, per_channel=per_channel)
    function = partial(gated_delta_rule, return_final_state=True, qk_l2norm=True)
    grads = torch.randn(2, 130, 3, 16), torch.randn(2, 3, 16, 16)
    results = on_threads((1, 2, 3), lambda: gradients(function, arguments, grads))
    for outputs, found in results[1:]:
        assert all(map(torch.equal, outputs + found, results[0][0] + results[0][1]))


@PER_CHANNEL
def test_second_derivative(per_channel: bool) -> None:
    torch.manual_seed(10)
    check_second_derivative(
        partial(gated_delta_rule, qk_l2norm=True),
        partial(reference.gated_delta_rule, qk_l2norm=True),
        inputs(1, 4, 1, 2, 3, 3, per_channel=per_channel),
    )


@pytest.mark.parametrize("index", range(5))
def test_second_derivative_with_constants(index: int) -> None:
    """The final state does not depend on q, the only input here that a gradient is wanted of."""
    torch.manual_seed(12)

    arguments = inputs(1, 4, 1, 2, 3, 3)

    def of_one(function: Callable[..., Any], tensor: Tensor) -> Any:
        tensors = [t.to(tensor.dtype) for t in arguments]
        tensors[index] = tensor
        return function(*tensors, return_final_state=True)

    of_ours, definition = (partial(of_one, f) for f in (gated_delta_rule, reference.gated_delta_rule))
    check_second_derivative(of_ours, definition, (arguments[index],))


def test_no_derivative_is_zero() -> None:
    q, *others = inputs(1, 4, 1, 2, 3, 3)
    state = gated_delta_rule(q.requires_grad_(), *others, return_final_state=True)[1]
    (grad,) = torch.autograd.grad(state.sum(), q, create_graph=True)
    assert torch.equal(grad, torch.zeros_like(q))


@PER_CHANNEL
def test_reference_gradient(per_channel: bool) -> None:
    torch.manual_seed(11)
    arguments = inputs(1, 4, 1, 2, 3, 2, per_channel=per_channel)
    leaves = [t.double().requires_grad_() for t in (*arguments, torch.randn(2, 2, 3, 2))]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:  # float64 runs the definition
        return gated_delta_rule(
            *tensors[:5], initial_state=tensors[5], return_final_state=True, cu_seqlens=torch.tensor([0, 1, 4])
        )

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({1: (2, 3, 2, 7)}, ["q", "k", "[2, 3, 2, 8]", "[2, 3, 2, 7]"]),
        ({2: (2, 3, 3, 8)}, ["a multiple of key_heads", "[2, 3, 3, 8]"]),
        ({3: (2, 3, 2)}, ["g must be [batch, seq, value_heads]", "[2, 3, 2]"]),
        ({3: (2, 3, 4, 7)}, ["or [batch, seq, value_heads, key_dim]", "[2, 3, 4, 7]"]),
        ({4: (2, 4, 4)}, ["beta must be [batch, seq, value_heads]", "[2, 4, 4]"]),
    ],
    ids=["k", "heads", "g", "channels", "beta"],
)
def test_errors_name_the_arguments(dtype: torch.dtype, changes, named: list[str]) -> None:
    shapes = [(2, 3, 2, 8), (2, 3, 2, 8), (2, 3, 4, 8), (2, 3, 4), (2, 3, 4)]
    tensors = [torch.ones(changes.get(i, shape), dtype=dtype) for i, shape in enumerate(shapes)]
    with pytest.raises(RuntimeError) as error:
        gated_delta_rule(*tensors)
    assert all(part in str(error.value) for part in ("gated_delta_rule", *named)), error.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_keys_and_no_dimensions(dtype: torch.dtype) -> None:
    arguments = [t.to(dtype) for t in inputs(1, 3, 1, 1, 0, 4)]
    assert torch.equal(gated_delta_rule(*arguments), torch.zeros(1, 3, 1, 4, dtype=dtype))
    with pytest.raises(RuntimeError, match=r"gated_delta_rule: .*q is"):
        gated_delta_rule(torch.ones((), dtype=dtype), *arguments[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_states_and_sequences_must_fit(dtype: torch.dtype) -> None:
    arguments = [t.to(dtype) for t in inputs(2, 3, 1, 1, 8, 4)]
    with pytest.raises(RuntimeError, match=r"initial_state must be .* = \[2, 1, 8, 4\]"):
        gated_delta_rule(*arguments, initial_state=torch.ones(2, 1, 4, 8, dtype=dtype))
    with pytest.raises(RuntimeError, match="cu_seqlens must ascend within the 6 tokens"):
        gated_delta_rule(*arguments, cu_seqlens=torch.tensor([0, 7]))
