"""rotary against its definition: values, gradients, layouts, partial and interleaved rotation, edge cases, errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import reference, rotary
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)

# How q and k, [batch, heads, seq, head_dim], lie in memory.
HEAD_LAYOUTS = {
    **LAYOUTS,
    "as transformers passes them": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a fused projection": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]
    ),
}


def make(
    batch: int = 2,
    heads: int = 4,
    key_value_heads: int = 2,
    seq: int = 9,
    head_dim: int = 16,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    angle_batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and angles; the two halves of the angles differ, so that a mix-up shows."""
    q, k = (
        torch.randn(batch, heads, seq, head_dim).to(dtype),
        torch.randn(batch, key_value_heads, seq, head_dim).to(dtype),
    )
    angle = 3 * torch.randn(angle_batch, seq, head_dim if rotary_dim is None else rotary_dim)
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


def check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, grad_layout: str = "contiguous"
) -> None:
    """Values and gradients of one call."""
    fused = partial(rotary, cos=cos, sin=sin, interleaved=interleaved)
    definition = partial(reference.rotary, cos=cos.double(), sin=sin.double(), interleaved=interleaved)
    grads = [HEAD_LAYOUTS[grad_layout](torch.randn_like(t)) for t in fused(q, k)]
    outputs, input_grads = gradients(fused, (q, k), grads)
    expected, expected_grads = in_double(definition, (q, k), grads)
    for name, actual, target in zip(
        ("q", "k", "grad_q", "grad_k"), outputs + input_grads, expected + expected_grads, strict=True
    ):
        assert_close(actual, target, name)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 24, 64, 80, 128, 256])
def test_values_and_gradients(dtype: torch.dtype, head_dim: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    check(*make(head_dim=head_dim, dtype=dtype), interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 2, 10, 32, 62, 64])
def test_partial_rotation(dtype: torch.dtype, rotary_dim: int, interleaved: bool) -> None:
    """The elements behind rotary_dim pass through, bit for bit."""
    torch.manual_seed(1)
    q, k, cos, sin = make(head_dim=64, rotary_dim=rotary_dim, dtype=dtype)
    check(q, k, cos, sin, interleaved=interleaved)
    for x, out in zip((q, k), rotary(q, k, cos, sin, interleaved=interleaved), strict=True):
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(("heads", "key_value_heads"), [(1, 1), (6, 2), (6, 1), (7, 7), (3, 5)])
@pytest.mark.parametrize("angle_batch", [1, 3])
def test_heads_and_batches(heads: int, key_value_heads: int, angle_batch: int) -> None:
    torch.manual_seed(2)
    check(*make(batch=3, heads=heads, key_value_heads=key_value_heads, angle_batch=angle_batch), interleaved=False)


@pytest.mark.parametrize("seq", [1, 7, 8, 9, 33])
def test_sequence_lengths(seq: int) -> None:
    torch.manual_seed(3)
    check(*make(seq=seq), interleaved=False)


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_layouts(layout: str, interleaved: bool) -> None:
    torch.manual_seed(4)
    arrange = HEAD_LAYOUTS[layout]
    q, k, cos, sin = make(seq=11, head_dim=24, rotary_dim=20)
    check(arrange(q), arrange(k), cos, sin, interleaved=interleaved, grad_layout=layout)
    check(q, arrange(k), LAYOUTS["every_other_column"](cos), LAYOUTS["columns_of_wider"](sin), interleaved=interleaved)


def test_output_lies_in_memory_like_the_input() -> None:
    """What transformers passes comes back in its order, so that no copy follows."""
    q, k, cos, sin = make()
    arrange = HEAD_LAYOUTS["as transformers passes them"]
    for x in (q, arrange(q)):
        assert rotary(x, k, cos, sin)[0].stride() == x.stride()


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 20), st.integers(1, 24)),
    st.floats(0, 1),
    st.sampled_from(KERNEL_DTYPES),
    *[st.sampled_from(sorted(HEAD_LAYOUTS))] * 3,
    st.booleans(),
)
def test_any_call(sizes, rotated, dtype, q_layout, k_layout, grad_layout, interleaved) -> None:
    batch, heads, key_value_heads, seq, half_head_dim = sizes
    torch.manual_seed(seq)
    q, k, cos, sin = make(
        batch,
        heads,
        key_value_heads,
        seq,
        2 * half_head_dim,
        2 * round(rotated * half_head_dim),
        dtype,
        angle_batch=batch,
    )
    check(
        HEAD_LAYOUTS[q_layout](q), HEAD_LAYOUTS[k_layout](k), cos, sin, interleaved=interleaved, grad_layout=grad_layout
    )


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("dtype", "angle_dtype", "out"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_angles_of_another_dtype(dtype, angle_dtype, out, interleaved: bool) -> None:
    """As under autocast: the result has the promoted dtype, the gradient that of the input."""
    torch.manual_seed(5)
    q, k, cos, sin = make(dtype=dtype)
    cos, sin = cos.to(angle_dtype), sin.to(angle_dtype)
    assert rotary(q, k, cos, sin)[0].dtype == out == reference.rotary(q, k, cos, sin)[0].dtype
    check(q, k, cos, sin, interleaved=interleaved)


def test_the_two_pairings_differ() -> None:
    torch.manual_seed(6)
    inputs = make()
    assert not torch.allclose(rotary(*inputs)[0], rotary(*inputs, interleaved=True)[0], atol=0.1)


def test_expanded_gradients() -> None:
    torch.manual_seed(7)
    q, k, cos, sin = make()
    q.requires_grad_()
    k.requires_grad_()
    q_out, k_out = rotary(q, k, cos, sin)
    (q_out.sum() + k_out.sum()).backward()
    _, expected = in_double(
        lambda q, k: reference.rotary(q, k, cos.double(), sin.double()),
        (q, k),
        (torch.ones_like(q), torch.ones_like(k)),
    )
    assert_close(q.grad, expected[0], "grad_q")
    assert_close(k.grad, expected[1], "grad_k")


def test_only_the_queries_are_used() -> None:
    q, k, cos, sin = make()
    q.requires_grad_()
    k.requires_grad_()
    rotary(q, k, cos, sin)[0].sum().backward()
    assert torch.equal(k.grad, torch.zeros_like(k))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq": 0}, {"heads": 0}, {"head_dim": 0}, {"rotary_dim": 0}], ids=str)
def test_zero_sizes(sizes: dict[str, int]) -> None:
    q, k, cos, sin = make(**sizes)
    q.requires_grad_()
    k.requires_grad_()
    q_out, k_out = rotary(q, k, cos, sin)
    (q_out.sum() + k_out.sum()).backward()
    assert q_out.shape == q.grad.shape == q.shape
    assert k_out.shape == k.grad.shape == k.shape


def test_thread_count_does_not_show() -> None:
    torch.manual_seed(8)
    q, k, cos, sin = make(seq=130, head_dim=64)
    results = on_threads((1, 2, 3), lambda: rotary(q, k, cos, sin))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("layout", ["contiguous", "as transformers passes them"])
@pytest.mark.parametrize("rotary_dim", [128, 64, 48])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_larger_than_the_cache(layout: str, rotary_dim: int, interleaved: bool) -> None:
    torch.manual_seed(9)
    q, k, cos, sin = make(1, 16, 4, 4096, 128, rotary_dim, torch.bfloat16)
    whole = rotary(*map(HEAD_LAYOUTS[layout], (q, k)), cos, sin, interleaved=interleaved)
    pieces = [
        rotary(*piece, interleaved=interleaved)
        for piece in zip(q.split(256, 2), k.split(256, 2), cos.split(256, 1), sin.split(256, 1), strict=True)
    ]
    for i, tensor in enumerate(whole):
        assert torch.equal(tensor, torch.cat([piece[i] for piece in pieces], 2))


def test_second_derivative() -> None:
    torch.manual_seed(10)
    q, k, cos, sin = make()
    check_second_derivative(
        lambda q, k: rotary(q, k, cos, sin),
        lambda q, k: reference.rotary(q, k, cos.double(), sin.double()),
        (q, k),
    )


def test_angles_that_need_gradients_get_them() -> None:
    q, k, cos, sin = make()
    cos.requires_grad_()
    rotary(q, k, cos, sin)[0].sum().backward()
    assert cos.grad is not None
    with pytest.raises(RuntimeError, match="no gradient for cos and sin"):
        torch.ops.mindspeed.rotary(q, k, cos, sin, False)[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q, k, c, s: (q[0], k, c, s), ["q", "[4, 9, 16]"]),
        (lambda q, k, c, s: (q, k[:, :, :8], c, s), ["k", "[2, 2, 8, 16]"]),
        (lambda q, k, c, s: (q, k, c[:, :8], s[:, :8]), ["cos", "[1, 8, 16]"]),
        (lambda q, k, c, s: (q, k, c, s[..., :8]), ["sin", "[1, 9, 8]"]),
        (lambda q, k, c, s: (q, k, c[..., :7], s[..., :7]), ["rotary_dim", "even", "[1, 9, 7]"]),
        (lambda q, k, c, s: (q[..., :8], k[..., :8], c, s), ["rotary_dim", "head_dim", "[1, 9, 16]"]),
        (lambda q, k, c, s: (q, k, c.expand(3, -1, -1), s.expand(3, -1, -1)), ["cos", "[3, 9, 16]"]),
        (lambda q, k, c, s: (q, k.half(), c, s), ["q", "k", "dtype", "Half"]),
        (lambda q, k, c, s: (q, k, c, s.half()), ["cos", "sin", "dtype", "Half"]),
    ],
)
def test_errors_name_the_arguments(dtype: torch.dtype, change, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        rotary(*change(*make(dtype=dtype)))
    message = str(error.value).replace("torch.float16", "Half")
    assert all(part in message for part in ("rotary", *named)), message


def test_float64_is_exact() -> None:
    inputs = make(dtype=torch.float64)
    assert all(map(torch.equal, rotary(*inputs), reference.rotary(*inputs)))


@pytest.mark.large
def test_more_elements_than_int32_counts() -> None:
    """Positions beyond 2^31 elements; inputs are expanded from one position, so that only the output takes memory."""
    seq = 2**24 + 8
    q, k, cos, sin = make(1, 1, 0, 1, 128, None, torch.bfloat16)
    q_out, _ = rotary(*(t.expand(*t.shape[:-2], seq, 128) for t in (q, k, cos, sin)))
    expected, _ = rotary(q, k, cos, sin)
    for position in (0, 2**23, 2**24 - 1, 2**24, -1):
        assert torch.equal(q_out[0, 0, position], expected[0, 0, 0])
