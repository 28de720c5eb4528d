"""Attention with AMX's tiles, for which a model stands in: values and gradients of the kernels that level amx runs."""

from __future__ import annotations

import ctypes
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_calls import ends, randoms
from tests.kernels.dense_attention import dense_attention
from tests.kernels.test_amx import build, needs_model, pointer

pytestmark = needs_model
NO_WINDOW = 2**60


class Sequence(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("batch", "query_begin", "query_length", "key_begin", "key_length", "offset")
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "query_tokens")),
        *((name, ctypes.c_int64) for name in ("key_block", "window", "num_sequences")),
        ("sequences", ctypes.POINTER(Sequence)),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "grad_out")),
        *((name, ctypes.c_void_p) for name in ("sinks", "logsumexp", "grad_logsumexp", "delta")),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_k", "grad_v", "grad_sinks")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("causal", ctypes.c_bool),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(tmp_path_factory.mktemp("amx"), source="attention.cpp")))
    library.tile_products.restype = ctypes.c_int64
    return library


def sequences_of(options: dict) -> list[Sequence]:
    ends_q, ends_k = (options[f"cu_seqlens_{name}"].tolist() for name in "qk")
    lengths_q, lengths_k = ([b - a for a, b in itertools.pairwise(e)] for e in (ends_q, ends_k))
    starts = zip(ends_q[:-1], lengths_q, ends_k[:-1], lengths_k, strict=True)
    offsets = options.get("query_offsets")
    return [
        Sequence(0, q0, nq, k0, nk, nk - nq if offsets is None else offsets[n].item())
        for n, (q0, nq, k0, nk) in enumerate(starts)
    ]


def run(library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grads: list[Tensor], **options):
    """``(out, logsumexp)`` and the gradients of q, k, v and sinks, of tensors ``[tokens, heads, dim]``, and how many
    products of tiles forward and backward took."""
    tokens, heads, head_dim = q.shape
    sequences = sequences_of(options)
    out = torch.zeros(tokens, heads, v.shape[-1], dtype=torch.bfloat16)
    logsumexp, delta = torch.full((heads, tokens), -torch.inf), torch.zeros(heads, tokens)
    input_grads = [torch.zeros(t.shape) for t in (q, k, v)] + ([] if sinks is None else [torch.zeros(heads)])
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks, "out": out, "logsumexp": logsumexp, "delta": delta}
    tensors |= dict(zip(("grad_out", "grad_logsumexp"), grads, strict=True))
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v", "grad_sinks"), input_grads, strict=False))
    call = Attention(
        num_heads=heads,
        num_kv_heads=k.shape[1],
        head_dim=head_dim,
        value_dim=v.shape[-1],
        query_tokens=tokens,
        key_block=384 if head_dim + v.shape[-1] <= 256 else 192,
        window=options.get("window") or NO_WINDOW,
        num_sequences=len(sequences),
        sequences=(Sequence * len(sequences))(*sequences),
        scale=options.get("scale") or 1 / math.sqrt(head_dim),
        softcap=options.get("softcap") or 0.0,
        causal=options.get("causal", True),
        **{name: pointer(t) for name, t in tensors.items()},
    )
    before = library.tile_products()
    library.attend(ctypes.byref(call))
    between = library.tile_products()
    library.differentiate(ctypes.byref(call))
    products = between - before, library.tile_products() - between
    return (out, logsumexp), [g if g.dim() == 1 else g.bfloat16() for g in input_grads], products


def check(library: ctypes.CDLL, shapes, sinks: Tensor | None = None, **options) -> tuple[int, int]:
    """Hold one call against attention in float64, and say how many products of tiles it took."""
    q, k, v = randoms(*shapes, dtype=torch.bfloat16)
    options = {"cu_seqlens_q": ends(len(q)), "cu_seqlens_k": ends(len(k))} | options
    grads = [torch.randn(*q.shape[:2], v.shape[-1]).bfloat16(), torch.randn(q.shape[1], len(q))]
    outputs, input_grads, products = run(library, q, k, v, sinks, grads, **options)
    dense_attention(q, k, v, sinks, *grads, **options).check(*outputs, input_grads)
    return products


def shapes_of(seq_q: int, seq_k: int, heads: int, kv_heads: int, head_dim: int, value_dim: int):
    return (seq_q, heads, head_dim), (seq_k, kv_heads, head_dim), (seq_k, kv_heads, value_dim)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tiles_multiply(library: ctypes.CDLL, causal: bool) -> None:
    """All products of attention, and none that the mask makes superfluous, at 16 x 16 x 32 elements each."""
    seq, head_dim, value_dim = 256, 64, 96
    tiles = (seq // 32) * (seq // 32 + 1) // 2 * 4 if causal else (seq // 16) ** 2
    forward, backward = check(library, shapes_of(seq, seq, 1, 1, head_dim, value_dim), causal=causal)
    assert forward == tiles * (head_dim + value_dim) // 32
    assert backward == tiles * (3 * head_dim + 2 * value_dim) // 32


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "heads", "kv_heads", "head_dim", "value_dim"),
    [
        (1, 1, 1, 1, 1, 1),
        (65, 65, 4, 2, 64, 64),
        (97, 97, 3, 1, 128, 128),
        (200, 200, 2, 2, 192, 128),  # keys of several blocks
        (40, 90, 2, 1, 72, 63),
        (90, 40, 2, 1, 33, 80),
        (50, 50, 1, 1, 320, 256),
        (1, 420, 2, 1, 20, 16),
    ],
)
def test_values_and_gradients(library: ctypes.CDLL, seq_q, seq_k, heads, kv_heads, head_dim, value_dim) -> None:
    torch.manual_seed(0)
    for causal in (True, False):
        check(library, shapes_of(seq_q, seq_k, heads, kv_heads, head_dim, value_dim), causal=causal)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_call(library: ctypes.CDLL, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=4))
    lengths_q, lengths_k = zip(*lengths, strict=True)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 100)),
        "softcap": draw(st.none() | st.floats(0.5, 50)),
        "scale": draw(st.none() | st.floats(0.01, 0.5)),
        "cu_seqlens_q": ends(*lengths_q),
        "cu_seqlens_k": ends(*lengths_k),
    }
    if draw(st.booleans()):
        offsets = st.lists(st.integers(-90, 90), min_size=len(lengths), max_size=len(lengths))
        options["query_offsets"] = torch.tensor(draw(offsets))
    torch.manual_seed(draw(st.integers(0, 100)))
    sinks = torch.randn(kv_heads * group) if draw(st.booleans()) else None
    dims = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    check(library, shapes_of(sum(lengths_q), sum(lengths_k), kv_heads * group, kv_heads, *dims), sinks, **options)
