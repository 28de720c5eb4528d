"""Experts of transformers' models: which are fused, with which options, and that the model computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mindspeed_kernels import hf
from mindspeed_kernels.hf.experts import FusedExperts
from tests.kernels.hf.models import COMMON, distance, run
from tests.kernels.hf.modules import site

_COMMON = COMMON | {"num_experts_per_tok": 2}
_GROUPED = {
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SWIGLU = FusedExperts(transposed=False)
FAMILIES: dict[str, tuple[dict[str, Any], int, FusedExperts]] = {
    "qwen3_moe": ({"num_experts": 6, "moe_intermediate_size": 24}, 2, SWIGLU),
    "mixtral": ({"num_local_experts": 4}, 2, SWIGLU),
    "deepseek_v3": (
        _GROUPED
        | {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "num_key_value_heads": 4,
        },
        1,
        SWIGLU,
    ),
    "gpt_oss": (
        {"num_local_experts": 4, "layer_types": ["full_attention", "full_attention"]},
        2,
        FusedExperts(transposed=True, interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0),
    ),
    "glm4_moe": (_GROUPED, 1, SWIGLU),
}


def build(family: str, *, implementation: str = "eager", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    options, _, _ = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **_COMMON | options)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation=implementation, dtype=dtype
        )
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_model_computes_the_same(family: str) -> None:
    _, sites, fusion = FAMILIES[family]
    model = build(family)
    logits, gradients = run(model)
    report = hf.apply(model, ["experts"])
    assert len(report.fused("experts")) == len(report.sites) == sites, report
    assert {found.proof.fusion for found in report.sites} == {fusion}
    fused_logits, fused_gradients = run(model)
    assert distance({"logits": fused_logits}, {"logits": logits}) < 1e-5
    assert distance(fused_gradients, gradients) < 2e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_implementation_by_name(family: str, recwarn) -> None:
    hf.register_experts()
    expected, expected_gradients = run(build(family))
    logits, gradients = run(build(family, implementation="mindspeed"))
    assert distance({"logits": logits}, {"logits": expected}) < 1e-5
    assert distance(gradients, expected_gradients) < 2e-5
    assert not [w for w in recwarn if "not fused" in str(w.message)]


def test_implementation_keeps_experts_that_differ() -> None:
    hf.register_experts()
    model = build("qwen3_moe", implementation="mindspeed")
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.act_fn = nn.GELU()
    with pytest.warns(UserWarning, match="experts: Qwen3MoeExperts not fused: the activation GELU is not SiLU"):
        logits, _ = run(model)
    model.set_experts_implementation("eager")
    assert distance({"logits": logits}, {"logits": run(model)[0]}) < 1e-5


def test_half_precision_and_autocast() -> None:
    model = build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    hf.apply(model, ["experts"])
    x, index, weights = torch.randn(7, 32), torch.randint(0, 6, (7, 2)), torch.rand(7, 2)
    expected = experts(x, index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert y.dtype == torch.float32
    half = experts.bfloat16()(x.bfloat16(), index, weights)
    assert half.dtype == torch.bfloat16
    assert torch.equal(y, half.float())
    assert distance({"y": half}, {"y": expected}) < 0.02


def test_where_there_is_no_kernel_the_model_computes() -> None:
    model = build("qwen3_moe", dtype=torch.float64)
    logits, gradients = run(model)
    hf.apply(model, ["experts"])
    fused_logits, fused_gradients = run(model)
    assert torch.equal(fused_logits, logits)
    assert distance(fused_gradients, gradients) == 0


def test_works_on_the_meta_device() -> None:
    config = AutoConfig.for_model("qwen3_moe", **_COMMON | FAMILIES["qwen3_moe"][0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(hf.apply(model, ["experts"]).fused("experts")) == 2


class Experts(nn.Module):
    """Stacked experts in the layout of transformers, without its interface."""

    def __init__(self, activation: nn.Module | None = None, scale: float = 1.0):
        super().__init__()
        self.num_experts, self.scale = 3, scale
        self.gate_up_proj = nn.Parameter(torch.randn(3, 20, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 10))
        self.activation = activation or nn.SiLU()

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            gate, up = (x[token] @ self.gate_up_proj[expert].T).chunk(2, -1)
            out = (self.activation(gate) * up * self.scale) @ self.down_proj[expert].T
            y.index_add_(0, token, (out * weights[token, choice, None]).to(y.dtype))
        return y


def test_any_module_of_the_structure() -> None:
    module = Experts()
    x, index, weights = torch.randn(5, 8), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    expected = module(x, index, weights)
    assert site(module, "experts").fused
    torch.testing.assert_close(module(x, index, weights), expected)


def test_another_activation_is_not_applicable(recwarn) -> None:
    assert site(Experts(nn.GELU()), "experts").outcome == "not fused: the activation GELU is not SiLU"
    assert not recwarn


def test_experts_that_differ_stay_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"experts: Experts \(0\) not fused: differs by"):
        assert not site(Experts(scale=1.001), "experts").fused
