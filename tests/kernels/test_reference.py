"""The definitions against what transformers computes: they must name the same functions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma_attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_interleaved
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated, recurrent_kimi_delta_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_attention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
    torch_recurrent_gated_delta_rule,
)

import mindspeed_kernels
from mindspeed_kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        (mindspeed_kernels.rms_norm, [(2, 4)]),
        (mindspeed_kernels.rms_norm_gated, [(2, 4), (2, 4), (4,)]),
        (mindspeed_kernels.swiglu, [(2, 4)]),
        (mindspeed_kernels.rotary, [(1, 1, 2, 4), (1, 1, 2, 4), (1, 2, 4), (1, 2, 4)]),
        (mindspeed_kernels.causal_conv1d, [(1, 2, 4), (4, 2)]),
        (mindspeed_kernels.gated_delta_rule, [(1, 2, 1, 4)] * 3 + [(1, 2, 1)] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_numbers_must_be_floating(operator, shapes, dtype: torch.dtype) -> None:
    for number in range(len(shapes)):
        one = [torch.ones(shape, dtype=dtype if i == number else torch.float32) for i, shape in enumerate(shapes)]
        for tensors in (one, [torch.ones(shape, dtype=dtype) for shape in shapes]):
            with pytest.raises(RuntimeError):
                operator(*tensors)


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


def attention_inputs(**config: float) -> tuple[nn.Module, list[Tensor], Tensor]:
    """What eager attention of transformers takes: a module's constants, q, k and v, an additive causal mask."""
    module = nn.Module()
    vars(module).update(num_key_value_groups=2, training=True, **config)
    qkv = [torch.randn(2, heads, 9, 8).double() for heads in (4, 2, 2)]
    return module, qkv, torch.full((9, 9), -torch.inf).double().triu(1)[None, None]


@pytest.mark.parametrize(
    ("eager", "options"),
    [(llama_attention, {}), (gemma_attention, {"softcap": 0.7}), (gpt_oss_attention, {"sinks": True})],
    ids=["llama", "gemma2", "gpt_oss"],
)
def test_flash_attention(eager, options) -> None:
    torch.manual_seed(3)
    module, qkv, mask = attention_inputs()
    if options.get("sinks"):
        options = {"sinks": torch.randn(4).double()}
        module.sinks = options["sinks"]
    expected, _ = eager(module, *qkv, mask, scaling=0.3, **{k: v for k, v in options.items() if k == "softcap"})
    actual = reference.flash_attention(*(t.transpose(1, 2) for t in qkv), scale=0.3, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # eager takes the softmax in float32


def test_flash_attention_is_bottom_right_aligned() -> None:
    """As scaled_dot_product_attention is with `causal_lower_right`."""
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 4, 5, 8).double(), *torch.randn(2, 2, 2, 9, 8).double()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 9), enable_gqa=True)
    actual = reference.flash_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    torch.testing.assert_close(actual.transpose(1, 2), expected, rtol=1e-12, atol=1e-12)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options) -> Tensor:
    """All that flash_attention returns, where it is finite."""
    out, logsumexp = reference.flash_attention(q, k, v, sinks=sinks, return_logsumexp=True, **options)
    return torch.cat((out.flatten(), logsumexp[logsumexp.isfinite()]))


def test_gradients_of_the_definitions() -> None:
    torch.manual_seed(2)
    x, weight, cos = torch.randn(3, 6).double(), torch.randn(6).double(), torch.randn(1, 3, 4).double()
    q, k = torch.randn(1, 2, 3, 6).double(), torch.randn(1, 1, 3, 6).double()
    attended = torch.randn(1, 3, 2, 2).double(), torch.randn(1, 3, 1, 2).double(), torch.randn(1, 3, 1, 3).double()
    sinks, ends = torch.randn(2).double(), torch.tensor([0, 2, 3])
    for function, inputs in (
        (lambda x, r, w: reference.add_rms_norm(x, r, w, zero_centered=True), (x, x.flip(0), weight)),
        (lambda q, k: reference.rotary(q, k, cos, cos.flip(1), interleaved=True), (q, k)),
        (reference.swiglu, (x, x.flip(1))),
        (partial(attend, window=2, softcap=2.0, query_offsets=torch.tensor([-1])), (*attended, sinks)),
        (partial(attend, causal=False), attended),
        (partial(attend, cu_seqlens_q=ends, cu_seqlens_k=ends), (*(t[0] for t in attended), sinks)),
    ):
        leaves = tuple(t.clone().requires_grad_() for t in inputs)
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize(
    ("module", "activation"), [(Qwen3NextRMSNormGated, "silu"), (KimiLinearRMSNormGated, "sigmoid")]
)
def test_rms_norm_gated(module, activation: str) -> None:
    """In float32: in half precision Qwen3-Next rounds twice more."""
    torch.manual_seed(6)
    norm = module(64, eps=1e-5)
    nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 50, 64)
    actual = reference.rms_norm_gated(x, gate, norm.weight, eps=1e-5, activation=activation)
    torch.testing.assert_close(actual, norm(x, gate), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize(
    ("theirs", "key_heads", "channels"),
    [(torch_recurrent_gated_delta_rule, 2, ()), (recurrent_kimi_delta_attention, 4, (8,))],
)
def test_gated_delta_rule(theirs, key_heads: int, channels: tuple[int, ...], qk_l2norm: bool) -> None:
    """transformers works in float32."""
    torch.manual_seed(7)
    q, k = torch.randn(2, 2, 20, key_heads, 8) / 8**0.5
    v, initial_state = torch.randn(2, 20, 4, 6), torch.randn(2, 4, 8, 6)
    g, beta = -torch.rand(2, 20, 4, *channels), torch.rand(2, 20, 4)
    out, state = theirs(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=qk_l2norm
    )
    arguments = (t.double() for t in (q, k, v, g, beta))
    actual = reference.gated_delta_rule(
        *arguments, qk_l2norm=qk_l2norm, initial_state=initial_state, return_final_state=True
    )
    for a, e in zip(actual, (out, state), strict=True):
        torch.testing.assert_close(a, e.double(), rtol=1e-5, atol=1e-5)
