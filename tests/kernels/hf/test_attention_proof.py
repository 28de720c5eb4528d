"""use_attention: switches a model whose attention proves equal, and no other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from mindspeed_kernels import hf
from tests.kernels.hf.models import build, distance, make, tokens
from tests.kernels.hf.test_attention import BATCHES, MODELS, run


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("family", MODELS)
def test_switches(family: str, device: str) -> None:
    model = make(*MODELS[family])
    if device == "meta":
        on_meta(model)
    state = {name: id(module) for name, module in model.named_modules()}
    config = copy.deepcopy(model.config)
    report = hf.use_attention(model)
    assert report.switched, str(report)
    assert model.config._attn_implementation == "mindspeed"
    assert len(report.fused("attention")) == 2
    assert report.errors("attention").keys() == {torch.float32, torch.bfloat16}
    assert "mindspeed instead of eager" in str(report)
    assert {name: id(module) for name, module in model.named_modules()} == state
    report.restore()
    assert model.config._attn_implementation == "eager"
    assert model.config.to_dict() == config.to_dict()


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """As the trainer has it: no weights yet, but buffers."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, torch.nn.Parameter(parameter.to("meta")))
    return model


def test_a_hybrid_without_weights() -> None:
    """Its first layer has no attention, and nothing to compute linear attention with yet."""
    model = on_meta(build("qwen3_next"))
    report = hf.use_attention(model)
    assert report.switched, str(report)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 64), (32, 128), (8, 256)])
def test_heads_of_real_sizes(heads: int, head_dim: int, implementation: str) -> None:
    """Rounding errors grow with the number of terms; they are no reason not to switch."""
    options = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": head_dim,
        "hidden_size": 512,
    }
    model = on_meta(make("qwen3", options))
    model.set_attn_implementation(implementation)
    assert hf.use_attention(model).switched


def test_the_results_stay() -> None:
    model = make(*MODELS["gemma3"])
    model.set_attn_implementation("sdpa")
    expected = run(model, BATCHES["packed"])
    assert hf.use_attention(model).switched
    hf.apply(model)
    assert distance(run(model, BATCHES["packed"]), expected) < 1e-5


def test_a_model_that_has_it_is_proved_against_eager() -> None:
    model = make(*MODELS["llama"])
    hf.register_attention()
    model.set_attn_implementation("mindspeed")
    assert hf.use_attention(model).switched


def test_dropout_keeps_the_model_as_it_is() -> None:
    model = make("llama", {"attention_dropout": 0.1})
    report = hf.use_attention(model)
    assert not report.switched
    assert model.config._attn_implementation == "eager"
    assert "attention_dropout is 0.1" in str(report)


@pytest.mark.parametrize("kind", ["scale", "window", "order"])
def test_another_computation_is_seen(kind: str) -> None:
    """An implementation that looks like attention and is none: the model keeps it."""

    def other(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple[Tensor, None]:
        eager = AttentionInterface._global_mapping["sdpa"]
        if kind == "scale":
            scaling *= 1.01
        elif kind == "window":
            query = query.clone()
            attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril().triu(-9)
        else:
            key, value = key.flip(1), value.flip(1)
        return eager(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register("other", other)
    try:
        model = make(*MODELS["llama"])
        model.set_attn_implementation("other")
        report = hf.use_attention(model)
        assert not report.switched
        assert model.config._attn_implementation == "other"
        assert "differs by" in str(report)
    finally:
        del AttentionInterface._global_mapping["other"]


def test_a_module_that_cannot_be_observed_keeps_the_model() -> None:
    model = make(*MODELS["llama"])
    original = type(model.model.layers[0].self_attn)

    class NeedsMore(original):
        def forward(self, hidden_states, position_embeddings, attention_mask, something, **kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask + something)

    model.model.layers[1].self_attn.__class__ = NeedsMore
    report = hf.use_attention(model)
    assert not report.switched
    assert "as a whole" in report.sites[0].outcome
    assert "cannot be observed" in report.sites[1].outcome
    assert model.config._attn_implementation == "eager"


def test_global_state_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    model = make(*MODELS["llama"])
    before = torch.get_rng_state()
    hf.use_attention(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(1), expected)
    model(tokens(), use_cache=False)
