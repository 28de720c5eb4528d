"""The definitions against what transformers computes: they must name the same functions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from mindspeed_kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (LlamaRMSNorm, {}),
        (Gemma3RMSNorm, {"zero_centered": True, "cast_order": "float32"}),
        (Qwen3NextRMSNorm, {"zero_centered": True, "cast_order": "float32"}),
    ],
)
def test_rms_norm(module, options, dtype: torch.dtype) -> None:
    """Bit for bit, in every dtype."""
    torch.manual_seed(0)
    norm = module(64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(50, 64).to(dtype)
    assert torch.equal(reference.rms_norm(x, norm.weight, eps=1e-5, **options), norm(x))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary(interleaved: bool) -> None:
    """In float64: in half precision transformers rounds every product, the definition only the result."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 4, 7, 16).double(), torch.randn(2, 2, 7, 16).double()
    frequencies = torch.randn(2, 7, 8 if not interleaved else 6).double()
    cos, sin = frequencies.repeat(1, 1, 2).cos(), frequencies.repeat(1, 1, 2).sin()
    expected = (apply_interleaved if interleaved else apply_rotary_pos_emb)(q, k, cos, sin)
    for actual, e in zip(reference.rotary(q, k, cos, sin, interleaved=interleaved), expected, strict=True):
        torch.testing.assert_close(actual, e, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_definitions() -> None:
    torch.manual_seed(2)
    x, weight, cos = torch.randn(3, 6).double(), torch.randn(6).double(), torch.randn(1, 3, 4).double()
    q, k = torch.randn(1, 2, 3, 6).double(), torch.randn(1, 1, 3, 6).double()
    for function, inputs in (
        (lambda x, r, w: reference.add_rms_norm(x, r, w, zero_centered=True), (x, x.flip(0), weight)),
        (lambda q, k: reference.rotary(q, k, cos, cos.flip(1), interleaved=True), (q, k)),
        (reference.swiglu, (x, x.flip(1))),
    ):
        leaves = tuple(t.clone().requires_grad_() for t in inputs)
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)
