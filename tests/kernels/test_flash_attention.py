"""flash_attention against attention over all scores at once: values, gradients, layouts, threads, errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import flash_attention, reference
from tests.kernels.attention_calls import check, ends, randoms, run
from tests.kernels.compare import KERNEL_DTYPES, LAYOUTS, check_second_derivative, on_threads
from tests.kernels.dense_attention import dense_attention


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "seq_q", "seq_k", "heads", "kv_heads", "head_dim", "value_dim"),
    [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 63, 63, 6, 2, 64, 64),
        (1, 65, 65, 6, 3, 128, 128),
        (2, 97, 97, 6, 1, 72, 72),
        (1, 33, 70, 7, 7, 104, 104),
        (2, 70, 33, 2, 1, 63, 63),
        (1, 40, 40, 2, 2, 192, 128),
        (1, 100, 100, 2, 2, 192, 128),  # many keys, heads of another width than values, in both ways
        (1, 100, 100, 2, 1, 96, 160),
        (1, 130, 130, 2, 1, 320, 256),
        (2, 30, 30, 2, 1, 256, 256),
        (1, 130, 130, 2, 1, 80, 16),
        (1, 1, 200, 4, 2, 20, 40),
    ],
)
def test_values_and_gradients(dtype, batch, seq_q, seq_k, heads, kv_heads, head_dim, value_dim) -> None:
    torch.manual_seed(0)
    shapes = (batch, seq_q, heads, head_dim), (batch, seq_k, kv_heads, head_dim), (batch, seq_k, kv_heads, value_dim)
    q, k, v = randoms(*shapes, dtype=dtype)
    check(q, k, v)
    check(q, k, v, causal=False)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": 300}, {"cu_seqlens_q": ends(30, 420, 450), "cu_seqlens_k": ends(470, 380, 50)}],
    ids=["causal", "full", "window", "packed"],
)
def test_several_tiles(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """More keys than the 384, and more queries than the 384 (float32: 192), that backward takes at a time."""
    torch.manual_seed(20)
    leading = (900,) if "cu_seqlens_q" in options else (1, 900)
    check(*randoms((*leading, 2, 16), (*leading, 1, 16), (*leading, 1, 24), dtype=dtype), **options)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [None, 1, 5, 64, 1000])
def test_options(dtype: torch.dtype, causal: bool, window: int | None) -> None:
    torch.manual_seed(1)
    q, k, v = randoms((2, 75, 4, 24), (2, 75, 2, 24), (2, 75, 2, 24), dtype=dtype)
    sinks = torch.randn(4)
    check(q, k, v, causal=causal, window=window)
    check(q, k, v, sinks, causal=causal, window=window)
    check(q, k, v, sinks, causal=causal, window=window, softcap=1.5, scale=0.7)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("offsets", [(0, 0), (64, 3), (-5, 40), (-70, 150), (33, -33)])
def test_offsets(causal: bool, window: int | None, offsets: tuple[int, int]) -> None:
    """Queries before, at, beyond the keys; the two sequences of a batch at different places."""
    torch.manual_seed(2)
    q, k, v = randoms((2, 66, 2, 16), (2, 70, 1, 16), (2, 70, 1, 16))
    options = {"causal": causal, "window": window, "query_offsets": torch.tensor(offsets)}
    check(q, k, v, **options)
    check(q, k, v, torch.randn(2), **options)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_packed(dtype: torch.dtype, index_dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(3)
    q, k, v = randoms((150, 4, 32), (150, 2, 32), (150, 2, 48), dtype=dtype)
    cu_seqlens = ends(1, 70, 0, 64, 15).to(index_dtype)
    check(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, window=window)
    check(q, k, v, torch.randn(4), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, window=window, causal=False)


def test_packed_with_other_keys() -> None:
    """Empty on one side or both, longer on either, shifted; and tokens that belong to no sequence."""
    torch.manual_seed(4)
    q, k, v = randoms((40, 2, 8), (60, 1, 8), (60, 1, 8))
    options = {"cu_seqlens_q": ends(0, 9, 5, 0, 20) + 3, "cu_seqlens_k": ends(4, 0, 30, 0, 12) + 5}
    for offsets in (None, torch.tensor([0, 3, -2, 1, 5])):
        for causal in (True, False):
            check(q, k, v, torch.randn(2), **options, query_offsets=offsets, causal=causal)
            check(q, k, v, **options, query_offsets=offsets, causal=causal, window=4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_call(data: st.DataObject) -> None:
    draw = data.draw
    dtype, layout = draw(st.sampled_from(KERNEL_DTYPES)), draw(st.sampled_from(sorted(LAYOUTS)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    head_dim, value_dim = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 100)),
        "softcap": draw(st.none() | st.floats(0.5, 50)),
        "scale": draw(st.none() | st.floats(0.01, 0.5)),
    }
    lengths = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths_q, lengths_k = zip(*lengths, strict=True)
        options |= {"cu_seqlens_q": ends(*lengths_q), "cu_seqlens_k": ends(*lengths_k)}
        leading_q, leading_k, sequences = (sum(lengths_q),), (sum(lengths_k),), len(lengths)
    else:
        sequences = draw(st.integers(1, 2))
        leading_q, leading_k = (sequences, lengths[0][0]), (sequences, lengths[0][1])
    if draw(st.booleans()):
        offsets = st.lists(st.integers(-90, 90), min_size=sequences, max_size=sequences)
        options["query_offsets"] = torch.tensor(draw(offsets))
    torch.manual_seed(draw(st.integers(0, 100)))
    shapes = (
        (*leading_q, kv_heads * group, head_dim),
        (*leading_k, kv_heads, head_dim),
        (*leading_k, kv_heads, value_dim),
    )
    q, k, v = randoms(*shapes, dtype=dtype)
    check(q, k, v, torch.randn(kv_heads * group) if draw(st.booleans()) else None, layout, **options)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(5)
    q, k, v = randoms((2, 21, 4, 24), (2, 21, 2, 24), (2, 21, 2, 40), dtype=dtype)
    check(q, k, v, layout=layout)
    cu_seqlens = ends(12, 9)
    check(q[0], k[0], v[0], layout=layout, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


def test_views_of_one_projection() -> None:
    """q, k and v as columns of one tensor, heads before positions as transformers has them."""
    torch.manual_seed(6)
    qkv = torch.randn(2, 8, 30, 16).transpose(1, 2)
    check(*qkv.split((4, 2, 2), 2))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_expanded_gradient(dtype: torch.dtype) -> None:
    """sum().backward() hands a gradient with one element of storage and strides of 0."""
    torch.manual_seed(7)
    q, k, v = (t.requires_grad_() for t in randoms((2, 35, 4, 16), (2, 35, 2, 16), (2, 35, 2, 16), dtype=dtype))
    out, logsumexp = flash_attention(q, k, v, return_logsumexp=True)
    (out.float().sum() + logsumexp.sum()).backward()
    expected = dense_attention(q, k, v, None, torch.ones_like(out), torch.ones_like(logsumexp))
    expected.check(out.detach(), logsumexp.detach(), (q.grad, k.grad, v.grad))


def test_gradient_of_one_output() -> None:
    torch.manual_seed(8)
    q, k, v = randoms((1, 20, 2, 8), (1, 20, 1, 8), (1, 20, 1, 8))
    zero_out, zero_logsumexp = torch.zeros(1, 20, 2, 8), torch.zeros(1, 2, 20)
    for used in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        outputs = flash_attention(*leaves, return_logsumexp=True)
        grad = torch.randn_like(outputs[used])
        found = torch.autograd.grad(outputs[used], leaves, grad)
        grads = (grad, zero_logsumexp) if used == 0 else (zero_out, grad)
        dense_attention(q, k, v, None, *grads).check(outputs[0].detach(), outputs[1].detach(), found)


def test_frozen_inputs_get_no_gradient() -> None:
    q, k, v = randoms((1, 9, 2, 8), (1, 9, 1, 8), (1, 9, 1, 8))
    flash_attention(q.requires_grad_(), k, v, sinks=torch.zeros(2)).sum().backward()
    assert q.grad is not None
    assert k.grad is None
    assert v.grad is None


@pytest.mark.parametrize("sinks_dtype", KERNEL_DTYPES, ids=str)
def test_sinks_of_another_dtype(sinks_dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    q, k, v = randoms((2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), dtype=torch.bfloat16)
    check(q, k, v, torch.randn(4).to(sinks_dtype))


def test_sinks_take_part_of_the_probability() -> None:
    """One query, one key, logit 0: the sink takes half, and a sink of -inf nothing."""
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    out, logsumexp = flash_attention(q, k, v, sinks=torch.tensor([0.0, -torch.inf]), return_logsumexp=True)
    torch.testing.assert_close(out[0, 0], torch.tensor([0.5, 1.0])[:, None].expand(2, 4))
    torch.testing.assert_close(logsumexp[0, :, 0], torch.tensor([2.0, 1.0]).log())


# ---- The same numbers whatever the machine does.


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_thread_count_does_not_show(dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(16)
    leading = (1200,) if packed else (2, 800)
    q, k, v, grad = randoms((*leading, 4, 16), (*leading, 2, 16), (*leading, 2, 16), (*leading, 4, 16), dtype=dtype)
    options = {"cu_seqlens_q": ends(40, 800, 360), "cu_seqlens_k": ends(40, 800, 360)} if packed else {}
    grads = [grad, torch.randn(4, 1200) if packed else torch.randn(2, 4, 800)]
    results = on_threads((1, 2, 3, 2), lambda: run(q, k, v, torch.ones(4), grads, **options))
    for outputs, input_grads in results[1:]:
        assert all(map(torch.equal, outputs + input_grads, results[0][0] + results[0][1]))


def test_half_precision_rounds_once() -> None:
    """One key: out is its value, unchanged, and its gradient the sum of the gradients of the queries, rounded once."""
    torch.manual_seed(17)
    q, k, v = randoms((1, 40, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8), dtype=torch.bfloat16)
    grads = [torch.randn(1, 40, 1, 8).bfloat16(), torch.zeros(1, 1, 40)]
    (out, _), (_, _, grad_v) = run(q, k, v, None, grads, causal=False)
    assert torch.equal(out, v.expand_as(out))
    torch.testing.assert_close(grad_v, grads[0].float().sum(1, keepdim=True).bfloat16(), rtol=2**-8, atol=0)


# ---- Derivatives beyond the first, float64, errors.


def test_second_derivative() -> None:
    torch.manual_seed(18)

    def options(function: Callable, *inputs: Tensor) -> Any:
        *qkv, sinks = inputs
        return function(*qkv, sinks=sinks, window=5, softcap=3.0, return_logsumexp=True)

    inputs = randoms((1, 7, 2, 4), (1, 7, 1, 4), (1, 7, 1, 4), (2,))
    check_second_derivative(partial(options, flash_attention), partial(options, reference.flash_attention), inputs)


def test_backward_operator_cannot_be_differentiated_silently() -> None:
    q, k, v = (t.requires_grad_() for t in randoms((1, 3, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4)))
    arguments = (None, None, None, None, 0.5, True, None, None)
    out, logsumexp = torch.ops.mindspeed.flash_attention_forward(q, k, v, *arguments)
    grad, *_ = torch.ops.mindspeed.flash_attention_backward(out, None, q, k, v, out, logsumexp, *arguments)
    with pytest.raises(RuntimeError, match="flash_attention_backward has no derivative"):
        grad.sum().backward()


def test_operator_names_a_dtype_without_kernel() -> None:
    q = torch.ones(1, 3, 1, 4, dtype=torch.float64)
    with pytest.raises(
        RuntimeError, match=r"flash_attention_forward: q must be float32, bfloat16 or float16, but is Double"
    ):
        torch.ops.mindspeed.flash_attention_forward(q, q, q, None, None, None, None, 0.5, True, None, None)


def test_float64_is_exact() -> None:
    q, k, v = (t.double() for t in randoms((1, 5, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4)))
    assert torch.equal(flash_attention(q, k, v), reference.flash_attention(q, k, v))


BATCHED = ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
PACKED = ((5, 4, 8), (6, 2, 8), (6, 2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shapes", "options", "named"),
    [
        (((2, 5, 4, 8), (2, 6, 2, 7), (2, 6, 2, 8)), {}, ["[2, 5, 4, 8]", "[2, 6, 2, 7]"]),
        (((2, 5, 4, 8), (2, 6, 3, 8), (2, 6, 3, 8)), {}, ["multiple", "[2, 5, 4, 8]", "[2, 6, 3, 8]"]),
        (((2, 5, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8)), {}, ["[2, 5, 4, 8]", "[1, 6, 2, 8]"]),
        (((2, 5, 4, 8), (2, 6, 2, 8), (2, 7, 2, 8)), {}, ["[2, 7, 2, 8]"]),
        (((5, 4, 8), (6, 2, 8), (6, 2, 8)), {}, ["batch", "[5, 4, 8]"]),
        (BATCHED, {"cu_seqlens_q": ends(5), "cu_seqlens_k": ends(6)}, ["tokens", "[2, 5, 4, 8]"]),
        (PACKED, {"cu_seqlens_q": ends(5)}, ["cu_seqlens_q", "cu_seqlens_k"]),
        (PACKED, {"cu_seqlens_q": ends(5), "cu_seqlens_k": ends(3, 3)}, ["cu_seqlens_k", "2", "3"]),
        (PACKED, {"cu_seqlens_q": ends(6), "cu_seqlens_k": ends(6)}, ["cu_seqlens_q", "5"]),
        (PACKED, {"cu_seqlens_q": ends(5), "cu_seqlens_k": ends(7)}, ["cu_seqlens_k", "6"]),
        (PACKED, {"cu_seqlens_q": ends(5, -1), "cu_seqlens_k": ends(3, 3)}, ["cu_seqlens_q"]),
        (PACKED, {"cu_seqlens_q": ends(5).float(), "cu_seqlens_k": ends(6)}, ["cu_seqlens_q"]),
        (BATCHED, {"window": 0}, ["window", "0"]),
        (BATCHED, {"softcap": 0.0}, ["softcap", "0"]),
        (BATCHED, {"sinks": torch.zeros(2)}, ["sinks", "[4]", "[2]"]),
        (BATCHED, {"query_offsets": torch.zeros(3, dtype=torch.int64)}, ["query_offsets", "2", "3"]),
    ],
)
def test_errors_name_the_arguments(dtype: torch.dtype, shapes, options: dict, named: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        flash_attention(*randoms(*shapes, dtype=dtype), **options)
    message = str(error.value)
    assert all(part in message for part in ("flash_attention", *named)), message


def test_one_dtype() -> None:
    q, k, v = randoms(*BATCHED)
    with pytest.raises(RuntimeError, match="one dtype"):
        flash_attention(q, k.bfloat16(), v)


@pytest.mark.large
def test_more_elements_than_int32_counts() -> None:
    """2^31 elements of output; the inputs are expanded, and a window of 4 keys keeps the work small."""
    heads, head_dim, seq = 64, 64, 2**19 + 8
    torch.manual_seed(19)
    q, k, v = (torch.randn(1, 1, 1, head_dim).bfloat16().expand(1, seq, heads, head_dim) for _ in range(3))
    out, logsumexp = flash_attention(q, k, v, window=4, return_logsumexp=True)
    assert torch.equal(out[0, [0, 2**18, 2**19 - 1, 2**19, -1]], v[0, :5])
    assert (logsumexp[..., 3:] == logsumexp[..., 3:4]).all()
