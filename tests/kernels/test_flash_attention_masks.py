"""Which keys flash_attention sees: windows, blind queries, packed sequences, and keys in several calls."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed_kernels import flash_attention
from mindspeed_kernels.ops.flash_attention import backward, forward
from tests.kernels.attention_calls import check, ends, randoms, run
from tests.kernels.compare import FLOAT32_EPS, KERNEL_DTYPES
from tests.kernels.dense_attention import dense_attention, visible


def test_windows_count_the_own_key() -> None:
    """Uniform attention over values that are one-hot: the rows of out are the masks."""
    q, v = torch.zeros(1, 6, 1, 4), torch.eye(6)[None, :, None]
    k = torch.zeros(1, 6, 1, 4)

    def counts(**options) -> list[int]:
        return (flash_attention(q, k, v, **options)[0, :, 0] > 0).sum(-1).tolist()

    assert counts() == [1, 2, 3, 4, 5, 6]
    assert counts(window=3) == [1, 2, 3, 3, 3, 3]
    assert counts(window=1) == [1] * 6
    assert counts(causal=False) == [6] * 6
    assert counts(causal=False, window=2) == [2, 3, 3, 3, 3, 2]
    assert counts(window=3, query_offsets=torch.tensor([-2])) == [0, 0, 1, 2, 3, 3]


def test_window_of_all_keys_is_no_window() -> None:
    torch.manual_seed(10)
    q, k, v = randoms((1, 70, 2, 16), (1, 70, 1, 16), (1, 70, 1, 16))
    for window in (70, 71, 2**40):
        assert torch.equal(flash_attention(q, k, v, window=window), flash_attention(q, k, v))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_grouped_heads_share_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    q, k, v = randoms((1, 50, 6, 16), (1, 50, 2, 16), (1, 50, 2, 16), dtype=dtype)
    repeated = flash_attention(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))
    assert torch.equal(flash_attention(q, k, v), repeated)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_blind_queries(dtype: torch.dtype, causal: bool) -> None:
    """No key in sight: 0, -inf, and no gradient, even where the gradient of their logsumexp is not a number."""
    torch.manual_seed(12)
    q, k, v = randoms((1, 80, 2, 8), (1, 20, 1, 8), (1, 20, 1, 8), dtype=dtype)
    options = {"causal": causal, "window": 3, "query_offsets": torch.tensor([-30])}
    sees = visible(80, 20, -30, causal, 3).any(1)
    assert not sees.all()
    grads = [torch.randn(1, 80, 2, 8).to(dtype), torch.randn(1, 2, 80).masked_fill(~sees, torch.nan)]
    (out, logsumexp), (grad_q, grad_k, grad_v) = run(q, k, v, None, grads, **options)
    assert (out[:, ~sees] == 0).all()
    assert (logsumexp[..., ~sees] == -torch.inf).all()
    assert (grad_q[:, ~sees] == 0).all()
    assert all(t.isfinite().all() for t in (out, grad_q, grad_k, grad_v))
    expected = dense_attention(q, k, v, None, grads[0], grads[1].nan_to_num(0.0), **options)
    expected.check(out, logsumexp, (grad_q, grad_k, grad_v))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "seq_q", "seq_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)], ids=["batch", "q", "k", "both"]
)
def test_zero_sizes(dtype: torch.dtype, batch: int, seq_q: int, seq_k: int) -> None:
    shapes = (batch, seq_q, 4, 8), (batch, seq_k, 2, 8), (batch, seq_k, 2, 8)
    check(*randoms(*shapes, dtype=dtype))
    check(*randoms(*shapes, dtype=dtype), torch.randn(4), causal=False)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_extreme_logits(dtype: torch.dtype) -> None:
    """Logits below every finite stand-in for -inf, and far apart: each query takes the value of its largest logit."""
    size = 240.0  # of q and k; the logits are -size²·[1, 2, ...]
    q = torch.full((1, 70, 1, 1), size, dtype=dtype)
    k = -size * torch.arange(1, 71).to(dtype).view(1, 70, 1, 1)
    v = torch.arange(1, 71).to(dtype).view(1, 70, 1, 1)
    # float32 does not tell logsumexps apart that are closer than this, so neither are probabilities known better.
    rtol = size**2 * FLOAT32_EPS + torch.finfo(dtype).eps
    grads = [torch.ones(1, 70, 1, 1, dtype=dtype), torch.ones(1, 1, 70)]
    (out, logsumexp), input_grads = run(q, k, v, None, grads, causal=False)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=rtol, atol=0)
    torch.testing.assert_close(logsumexp, torch.full((1, 1, 70), -(size**2)))
    assert all(grad.isfinite().all() for grad in input_grads)
    torch.testing.assert_close(input_grads[2][0, 0, 0, 0], torch.tensor(70.0, dtype=dtype), rtol=rtol, atol=0)
    assert (input_grads[2][0, 1:] == 0).all()
    # The other way round the last key that a query sees has the largest logit.
    torch.testing.assert_close(flash_attention(q, -k, v), v, rtol=rtol, atol=0)


def test_softcap_bounds_the_logits() -> None:
    """The cap is applied before the mask, not to what is masked: with logits of 0, softmax stays uniform."""
    q, k, v = torch.zeros(1, 5, 1, 3), torch.zeros(1, 5, 1, 3), torch.randn(1, 5, 1, 3)
    _, logsumexp = flash_attention(q, k, v, softcap=2.0, return_logsumexp=True)
    torch.testing.assert_close(logsumexp[0, 0], torch.arange(1.0, 6.0).log())
    _, logsumexp = flash_attention(q + 100, k + 100, v, softcap=2.0, return_logsumexp=True)
    torch.testing.assert_close(logsumexp[0, 0], torch.arange(1.0, 6.0).log() + 2.0)


# ---- Packed sequences, and keys in several calls.


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_packed_equals_separate(dtype: torch.dtype, causal: bool) -> None:
    """Bit for bit, values and gradients."""
    torch.manual_seed(13)
    lengths = (33, 1, 90)
    q, k, v, grad = randoms((124, 4, 16), (124, 2, 16), (124, 2, 16), (124, 4, 16), dtype=dtype)
    cu_seqlens, sinks = ends(*lengths), torch.randn(4)
    grads = [grad, torch.randn(4, 124)]
    options = {"causal": causal, "window": 40}
    together, grads_together = run(q, k, v, sinks, grads, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **options)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        part = [t[None, start:end] for t in (q, k, v)]
        alone, grads_alone = run(*part, sinks, [grads[0][None, start:end], grads[1][None, :, start:end]], **options)
        assert torch.equal(together[0][start:end], alone[0][0])
        assert torch.equal(together[1][:, start:end], alone[1][0])
        for a, b in zip(grads_together[:3], grads_alone[:3], strict=True):
            assert torch.equal(a[start:end], b[0])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_documents_do_not_see_each_other(dtype: torch.dtype) -> None:
    """Whatever happens in the first document does not move the second by one bit."""
    torch.manual_seed(14)
    q, k, v, grad = randoms((70, 2, 16), (70, 1, 16), (70, 1, 16), (70, 2, 16), dtype=dtype)
    cu_seqlens = ends(31, 39)
    results = []
    for change in (0.0, 1.0, torch.nan):
        changed = [torch.cat((t[:5] + change, t[5:])) for t in (q, k, v, grad)]
        outputs, input_grads = run(
            *changed[:3], None, [changed[3], torch.zeros(2, 70)], cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens
        )
        results.append((outputs[0][31:], outputs[1][:, 31:], *(g[31:] for g in input_grads)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_keys_in_several_calls(dtype: torch.dtype, window: int | None) -> None:
    """What ring context parallelism does: chunks of keys, merged by their logsumexp, and gradients that add up."""
    torch.manual_seed(15)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, grad = randoms((1, 90, 4, 16), (1, 90, 2, 16), (1, 90, 2, 16), (1, 90, 4, 16), dtype=dtype)
    sinks, grad_logsumexp = randoms((4,), (1, 4, 90), dtype=wide)
    calls, parts = [], []
    for start in (0, 30, 60):
        # The first query sits `start` keys before the first key of this chunk.
        options = {"window": window, "query_offsets": torch.tensor([-start]), "sinks": None if start else sinks}
        calls.append((k[:, start : start + 30], v[:, start : start + 30], options))
        parts.append(forward(q, *calls[-1][:2], **options))
    logsumexp = torch.logsumexp(torch.stack([part.double() for _, part in parts]), 0)
    out = sum(torch.exp(lse.double() - logsumexp).mT[..., None] * part for part, lse in parts).to(dtype)
    logsumexp = logsumexp.to(wide)
    found = [backward(grad, grad_logsumexp, q, k, v, out, logsumexp, **options) for k, v, options in calls]
    grad_q = sum(grads[0].double() for grads in found).to(dtype)
    grad_k, grad_v = (torch.cat([grads[n] for grads in found], 1) for n in (1, 2))
    assert [grads[3] is None for grads in found] == [False, True, True]

    expected = dense_attention(q, k, v, sinks, grad, grad_logsumexp, window=window)
    if dtype != torch.float64:
        expected.check(out, logsumexp, (grad_q, grad_k, grad_v, found[0][3]))
        return
    torch.testing.assert_close((out, logsumexp), (expected.out.value, expected.logsumexp))
    for actual, e in zip((grad_q, grad_k, grad_v, found[0][3]), expected.grads.values(), strict=True):
        torch.testing.assert_close(actual, e.value)
