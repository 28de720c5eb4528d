"""Tiny models of the families whose conventions differ, and the number of sites in each."""

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mindspeed_kernels.hf.rotary import with_globals

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Every expert takes every token: with fewer, a rounding error that moves a token to another expert is a jump.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Family:
    model_type: str
    rms_norm: int
    rotary: int
    swiglu: int
    options: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    rms_norm_gated: int = 0
    linear_attention: int = 0
    documents: int = 0


FAMILIES = {
    "llama": Family("llama", 5, 2, 2),
    "mistral": Family("mistral", 5, 2, 2),
    "qwen2": Family("qwen2", 5, 2, 2),
    "qwen3": Family("qwen3", 9, 2, 2),  # q_norm and k_norm
    # One dense layer and one with experts.
    "qwen3_moe": Family("qwen3_moe", 9, 2, 1, _EXPERTS | {"mlp_only_layers": [0]}, experts=1),
    # Zero-centred norms, partial rotary in the one layer with attention, shared experts; linear attention in the other.
    "qwen3_next": Family(
        "qwen3_next",
        7,
        1,
        2,
        _EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        experts=2,
        rms_norm_gated=1,
        linear_attention=1,
        documents=2,  # of the layer, and of the model
    ),
    # Zero-centred norms that round once, four a layer; GELU.
    "gemma3": Family("gemma3_text", 13, 2, 0, {"query_pre_attn_scalar": 16}),
    "phi3": Family("phi3", 5, 2, 2),  # gate and up in one layer
    "glm4": Family("glm4", 9, 2, 2),  # interleaved and partial rotary, gate and up in one layer
}


def build(family: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with random weights, none of them at a value that hides a convention (norm weights 1 or 0)."""
    spec = FAMILIES[family]
    return make(spec.model_type, spec.options, device=device, dtype=dtype)


def make(
    model_type: str, options: dict[str, Any], *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The same for a model that is described right here."""
    config = AutoConfig.for_model(model_type, **COMMON | options)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager", dtype=dtype
        )
    if device != "meta":
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data.add_(noise.to(dtype))
    return model


def token_by_token(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose linear attention is transformers' code for decoding. That for chunks takes decays as exponentials of
    differences of sums over 64 tokens, which costs as many units in the last place as the sums are large."""
    model = copy.deepcopy(model)
    for mixer in model.modules():
        forward = inspect.unwrap(type(mixer).forward)
        for name in forward.__code__.co_names:
            if "chunk" in name and "delta" in name:
                own = with_globals(forward, {name: forward.__globals__[name.replace("chunk", "recurrent")]})
                mixer.forward = own.__get__(mixer)
    return model


def tokens(batch: int = 2, seq: int = 12) -> Tensor:
    return torch.randint(3, COMMON["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(1))


def run(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradients of the loss."""
    model.zero_grad()
    output = model(input_ids=tokens(), labels=tokens(), use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), gradients


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor's elements, in units of the tensor's largest element."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[n].double() - e.double()).abs().max() / e.double().abs().max()).item() for n, e in expected.items()
    )
