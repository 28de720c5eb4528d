"""The AscendC flash attention on the twin against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.npu.ascendc import MAX_ATTENTION_DIM
from tests.ascend.native import kernels
from tests.kernels.compare import FLOAT32_EPS, KERNEL_DTYPES


def logit_error(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> float:
    """How far off float32 leaves a logit: what is added up to it, or the softcap, times its precision."""
    group = q.shape[1] // k.shape[1]
    terms = torch.einsum("qhgd,khd->hgqk", q.double().abs().unflatten(1, (-1, group)), k.double().abs())
    return FLOAT32_EPS * max(1.0, scale * terms.max().item(), softcap or 0.0)


def check(q: Tensor, k: Tensor, v: Tensor, *, blocks: int = 2, sinks: Tensor | None = None, **options) -> None:
    """Output, logsumexp and gradients. p and ds are rounded to the inputs' dtype before they meet another matrix; in
    float32, their logits have been before."""
    twin = kernels(blocks=blocks)
    out, logsumexp = twin.flash_attention(q, k, v, sinks=sinks, **options)
    packed = {"cu_seqlens_q": torch.tensor([0, len(q)]), "cu_seqlens_k": torch.tensor([0, len(k)])} | options
    packed["sinks"] = None if sinks is None else sinks.double()
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    expected, expected_logsumexp = reference.flash_attention(*wide, return_logsumexp=True, **packed)
    scale = options.get("scale") or q.shape[2] ** -0.5
    logit = logit_error(q, k, scale, options.get("softcap"))
    rounding = logit if q.dtype == torch.float32 else torch.finfo(q.dtype).eps / 2  # relative, of p
    error = (out.double() - expected).abs().max()
    assert error <= 2.5 * rounding * v.abs().max()
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=FLOAT32_EPS, atol=2 * logit)

    grad_out, grad_logsumexp = torch.randn_like(out), torch.randn_like(logsumexp)
    seen = (expected_logsumexp > -torch.inf).double()
    total = (expected * grad_out).sum() + (expected_logsumexp.masked_fill(seen == 0, 0.0) * grad_logsumexp).sum()
    expected_grads = torch.autograd.grad(total, wide)
    grads = twin.flash_attention_backward(grad_out, grad_logsumexp, q, k, v, out, logsumexp, **options)
    # What is rounded: p, of which a query has 1 in all and a key `column`, and ds, which is p times dp and the delta
    # that cancels against it.
    (column,) = torch.autograd.grad(reference.flash_attention(*wide, **packed).sum(), wide[2:])
    group = q.shape[1] // k.shape[1]
    dp = torch.einsum("qhgd,khd->hgqk", grad_out.double().unflatten(1, (-1, group)), v.double()).abs().max()
    sizes = (
        2 * scale * dp * k.abs().max(),
        2 * scale * dp * q.abs().max() * column.max(),
        grad_out.abs().max() * column.max(),
    )
    for name, actual, expected_grad, size in zip("qkv", grads, expected_grads, sizes, strict=True):
        error = (actual.double() - expected_grad).abs().max()
        assert error <= 3 * rounding * (size + expected_grad.abs().max()), f"grad_{name}: {error}, {size}"


# Queries, keys, query heads, key heads, head_dim, value_dim
SHAPES = [
    (1, 1, 1, 1, 16, 16),
    (5, 9, 2, 1, 24, 40),
    (70, 70, 4, 2, 64, 64),
    (130, 300, 2, 2, 20, 136),  # two query blocks, three tiles of keys, values of two tiles
    (33, 129, 1, 1, 300, 256),  # several steps of head_dim, values so long that a core takes 32 queries
]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_shapes(dtype: torch.dtype, shape: tuple[int, ...], causal: bool):
    torch.manual_seed(0)
    queries, keys, num_heads, num_kv_heads, head_dim, value_dim = shape
    q = torch.randn(queries, num_heads, head_dim).to(dtype)
    k, v = torch.randn(keys, num_kv_heads, head_dim).to(dtype), torch.randn(keys, num_kv_heads, value_dim).to(dtype)
    check(q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 50, 140])
def test_window(causal: bool, window: int):
    torch.manual_seed(1)
    q, k, v = torch.randn(150, 1, 16).half(), torch.randn(200, 1, 16).half(), torch.randn(200, 1, 16).half()
    check(q, k, v, causal=causal, window=window)


def test_packed_sequences():
    torch.manual_seed(2)
    q, k, v = torch.randn(150, 2, 16).half(), torch.randn(180, 1, 16).half(), torch.randn(180, 1, 16).half()
    ends_q, ends_k = torch.tensor([0, 1, 1, 140, 150]), torch.tensor([0, 7, 7, 150, 180])
    check(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    check(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, causal=False)


@pytest.mark.parametrize("offset", [-100, -20, 0, 60, 1000])
def test_offsets(offset: int):
    """Queries before all keys see nothing: out 0 and logsumexp -inf, never NaN."""
    torch.manual_seed(3)
    q, k, v = torch.randn(70, 1, 16).half(), torch.randn(90, 1, 16).half(), torch.randn(90, 1, 16).half()
    check(q, k, v, query_offsets=torch.tensor([offset]))
    check(q, k, v, query_offsets=torch.tensor([offset]), window=10)


@pytest.mark.parametrize("sink", [-torch.inf, -3.0, 2.0, 80.0])
def test_sinks(sink: float):
    """Smaller than all scores, among them, larger; of queries that see nothing too."""
    torch.manual_seed(6)
    q, k, v = torch.randn(70, 2, 16).half(), torch.randn(150, 1, 16).half(), torch.randn(150, 1, 16).half()
    sinks = torch.tensor([sink, 0.5])
    check(q, k, v, sinks=sinks)
    check(q, k, v, sinks=sinks, query_offsets=torch.tensor([-20]), window=30)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(dtype: torch.dtype, softcap: float):
    """Smaller than many scores, and larger than all."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(*shape).to(dtype) for shape in ((70, 2, 16), (150, 1, 16), (150, 1, 16)))
    check(q, k, v, softcap=softcap, scale=1.0)
    check(q, k, v, softcap=softcap, window=30, sinks=torch.tensor([-0.5, 1.0]))


def test_softcap_of_large_scores():
    """exp overflows on the way, and one that has reached the cap has no gradient."""
    torch.manual_seed(8)
    q, k, v = 30 * torch.randn(40, 1, 16), 30 * torch.randn(200, 1, 16), torch.randn(200, 1, 16)
    check(q.half(), k.half(), v.half(), causal=False, scale=1.0, softcap=3.0)


def test_large_scores_do_not_overflow():
    torch.manual_seed(4)
    q, k, v = 30 * torch.randn(40, 1, 16), 30 * torch.randn(200, 1, 16), torch.randn(200, 1, 16)
    check(q.half(), k.half(), v.half(), causal=False, scale=1.0)


@pytest.mark.parametrize("shape", [(1, 16, 5000), (40, 2000, 16)], ids=str)
def test_refuses_dimensions_that_do_not_fit(shape: tuple[int, int, int]):
    num_heads, head_dim, value_dim = shape
    q, k, v = (torch.zeros(1, num_heads, dim).half() for dim in (head_dim, head_dim, value_dim))
    message = f"head_dim {head_dim} and value_dim {value_dim} of {num_heads} heads are too large"
    with pytest.raises(RuntimeError, match=message):
        kernels().flash_attention(q, k, v)
    with pytest.raises(RuntimeError, match=message):
        kernels().flash_attention_backward(v, None, q, k, v, v, torch.ones(num_heads, 1))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_the_largest_dimension(dtype: torch.dtype):
    """Up to which PyTorch's operator takes a call."""
    limit = MAX_ATTENTION_DIM[dtype]
    for dim in (limit, limit + 1):
        q, k, v = torch.randn(3, 1, 1, dim).to(dtype)
        out, logsumexp = kernels().flash_attention(q, k, v)
        if dim == limit:
            kernels().flash_attention_backward(out, None, q, k, v, out, logsumexp)
        else:
            with pytest.raises(RuntimeError, match="are too large"):
                kernels().flash_attention_backward(out, None, q, k, v, out, logsumexp)


def test_results_do_not_depend_on_the_cores():
    torch.manual_seed(5)
    q, k, v = torch.randn(140, 3, 16).half(), torch.randn(140, 1, 16).half(), torch.randn(140, 1, 16).half()
    one, five = (kernels(blocks=blocks).flash_attention(q, k, v) for blocks in (1, 5))
    assert torch.equal(one[0], five[0])
    assert torch.equal(one[1], five[1])
