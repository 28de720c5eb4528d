"""Models whose attention cannot be cut are told by the module's name; nothing is silently wrong (peers' report E21)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV32Config,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    RecurrentGemmaConfig,
)

from mindspeed_kernels.hf.attention_mask import MaskParts
from mindspeed_kernels.hf.replace import fuse
from mindspeed_llm.batch import to_device
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.parallel.context.apply import apply_context_parallel
from mindspeed_llm.parallel.context.attention import context_parallel_attention
from mindspeed_llm.parallel.context.layout import SequenceLayout
from mindspeed_llm.parallel.context.sharder import ContextSharder
from tests.llm.parallel.cases import MODELS
from tests.llm.parallel.context.attention_cases import packed_batch

_SHAPE = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture
def mesh():
    """A group of one rank: all that the checks need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("batch", "ring", "ulysses"))
    dist.destroy_process_group()


def qwen3_next():
    return hybrid("qwen3_next")


def hybrid(name):
    return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), dtype=torch.float32)


def llama(**changes):
    return AutoModelForCausalLM.from_config(LlamaConfig(**_SHAPE | changes), dtype=torch.float32)


def batch() -> dict:
    """Two documents, as the second of two ranks would get them, with a layout of one rank."""
    whole = packed_batch({"rows": [[3, 5]]})
    sharded = ContextSharder(2, 1, 1, 0).shard_batch(whole)
    whole.layout = SimpleNamespace(cu_seqlens=sharded.layout.cu_seqlens, last_position=4)
    whole["input_ids"] = torch.arange(8, 16)[None]
    inputs = to_device(whole, torch.device("cpu"))
    return {name: inputs[name] for name in ("input_ids", "position_ids", "context_layout")}


def test_no_mesh_leaves_a_model_alone():
    model = llama()
    apply_context_parallel(model, None)
    assert model.config._attn_implementation == "sdpa"


def test_documents_do_not_see_each_other(mesh):
    """E9, without any mask: what transformers computes of the same packed documents."""
    model = llama()
    inputs = batch()
    expected = model(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    apply_context_parallel(model, mesh)
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_that_was_not_cut_is_an_error(mesh):
    model = llama()
    apply_context_parallel(model, mesh)
    with pytest.raises(RuntimeError, match=r"batches that ContextSharder\.shard_batch has cut"):
        model(torch.ones(1, 4, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            # A convolution of ours, and a scan over tokens that is not.
            JambaConfig(**_SHAPE, num_experts=2, mamba_d_state=4),
            r"model\.layers\.0\.mamba \(JambaMambaMixer\) mixes tokens in other ways than by convolution",
        ),
        (
            RecurrentGemmaConfig(**_SHAPE, lru_width=32),
            r"model\.layers\.0\.temporal_block\.conv_1d \(Conv1d\) mixes neighbouring tokens outside of attention",
        ),
        (Llama4TextConfig(**_SHAPE, intermediate_size_mlp=32), r"has layers of the type chunked_attention"),
        (DeepseekV32Config(**_SHAPE | {"num_key_value_heads": 4}), r"has (layers of the type|attention that only)"),
        (
            BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4),
            r"transformer\.h\.0 \(BloomBlock\) has no attention that goes through transformers' attention interface",
        ),
        (LlamaConfig(**_SHAPE, attention_dropout=0.1), r"model\.layers\.0\.self_attn .* has attention_dropout 0\.1"),
    ],
)
def test_attention_that_cannot_be_cut_is_told_at_start(config, message, mesh):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=message):
        apply_context_parallel(model, mesh)


@pytest.mark.parametrize(
    ("ring", "ulysses", "message"),
    [(3, 1, r"3 ranks \(4 = 1 · 3 \+ 1\); choose a divisor of 4"), (3, 2, r"6 ranks \(4 = 0 · 6 \+ 4\)")],
)
def test_heads_of_linear_attention_that_cannot_be_divided_are_told_at_start(ring, ulysses, message):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ring * ulysses)
    mesh = init_device_mesh("cpu", (1, ring, ulysses), mesh_dim_names=("batch", "ring", "ulysses"))
    with torch.device("meta"):
        model = qwen3_next()
    try:
        what = r"4 value heads in model\.layers\.0\.linear_attn cannot be divided among "
        with pytest.raises(ConfigError, match=what + message):
            apply_context_parallel(model, mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "mixer", "fused"),
    [("qwen3_next", "linear_attn", False), ("qwen3_next", "linear_attn", True), ("kimi_linear", "self_attn", False)],
)
def test_linear_attention_of_documents_that_do_not_see_each_other(name, mixer, fused, mesh):
    """What transformers computes of each alone; packed, its convolutions and states go from one to the next. Also where
    the module was given another forward before."""
    model = hybrid(name)
    ids = torch.arange(8)[None]
    expected = torch.cat([model(ids[:, :3], use_cache=False).logits, model(ids[:, 3:], use_cache=False).logits], 1)
    if fused:
        fuse(getattr(model.model.layers[0], mixer), Doubled())
    state = torch.get_rng_state()
    apply_context_parallel(model, mesh)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(two_documents(model), expected, rtol=1e-5, atol=1e-6)


def two_documents(model):
    whole = torch.arange(8)[None]
    layout = SequenceLayout(torch.tensor([0, 3, 8]), 8, 1, torch.ones(1, 1, 8, dtype=torch.bool), whole, 4)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    return model(torch.arange(8)[None], position_ids=positions, context_layout=layout, use_cache=False).logits


def test_positions_of_a_models_own_making_are_told(mesh):
    """Kimi Linear has no embedding of positions; with something added to those of the tokens it might have."""
    model = hybrid("kimi_linear")
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: (args[0] + torch.arange(8.0)[:, None],))
    apply_context_parallel(model, mesh)
    with pytest.raises(ConfigError, match="does not use the position ids that it is given"):
        two_documents(model)


@dataclass(frozen=True)
class Doubled:
    """A fusion."""

    def build(self, original):
        return lambda module, *args, **kwargs: 2 * original(module, *args, **kwargs)


@pytest.mark.parametrize("longest", [8, 40])
def test_rotations_are_those_of_the_longest_document(longest, mesh):
    """LongRoPE rotates everything otherwise when a document is longer than in pretraining, on whatever rank it ends."""
    config = Phi3Config(
        **_SHAPE, pad_token_id=0, original_max_position_embeddings=16, max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = copy.deepcopy(model.model.rotary_emb)(torch.zeros(1), torch.arange(longest)[None])
    apply_context_parallel(model, mesh)
    found = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    inputs = batch()
    inputs["position_ids"] = torch.arange(8)[None]
    inputs["context_layout"].last_position = longest - 1
    model(**inputs, use_cache=False)
    for actual, whole in zip(found[0], expected, strict=True):
        assert torch.equal(actual, whole[:, :8])


def test_a_window_that_only_the_mask_has_is_kept(mesh):
    """As Phi-3.5-MoE's, whose attention does not hand it on."""
    config = MistralConfig(**_SHAPE, sliding_window=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    inputs = batch()
    expected = model(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    apply_context_parallel(model, mesh)
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config.sliding_window = None
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)


def test_attention_that_does_not_exchange_is_told_at_the_first_batch(mesh):
    model = llama()
    apply_context_parallel(model, mesh)
    layer = model.model.layers[2].self_attn
    layer.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.self_attn .* did not attend through"):
        model(**batch(), use_cache=False)


def test_positions_that_are_not_used_are_told_at_the_first_batch(mesh):
    model = llama()
    apply_context_parallel(model, mesh)
    forget = lambda _, args, kwargs: (args, kwargs | {"position_ids": None})  # noqa: E731
    model.model.register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(ConfigError, match="does not use the position ids that it is given"):
        model(**batch(), use_cache=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, "an attention mask of its own"),
        ({"attention_mask": MaskParts(causal=True), "sliding_window": 2}, "a window that its mask does not have"),
        ({"attention_mask": MaskParts(causal=True, chunk_size=2)}, "attention in chunks"),
        ({"attention_mask": MaskParts(causal=False)}, "attention that is not causal"),
        ({"dropout": 0.5}, "dropout"),
        ({"is_causal": False}, "attention that is not causal"),
        ({"position_bias": torch.ones(1)}, "the attention argument position_bias"),
    ],
)
def test_attention_of_another_kind_is_told(arguments, message, mesh):
    model = llama()
    apply_context_parallel(model, mesh)
    module = model.model.layers[0].self_attn
    x = torch.ones(1, 4, 8, 8)
    with pytest.raises(ConfigError, match=f"LlamaAttention has {message}, which cannot be cut over ranks"):
        context_parallel_attention(module, x, x, x, **{"attention_mask": None} | arguments)
