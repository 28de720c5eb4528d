"""Tiny configurations of architectures that differ in what loading, initialising and exporting must cope with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_SIZES = {
    "vocab_size": 65, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS = {
    **dict.fromkeys(_NUM_EXPERTS, 3), "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_shared_experts": 1, "shared_expert_intermediate_size": 12,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1e4,
}  # fmt: skip

ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_yarn": {"rope_parameters": _YARN},
    "llama_llama3": {"rope_parameters": _LLAMA3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # tied; Conv1D; no rope
    "qwen2": {},  # biases
    "qwen3_moe": _EXPERTS,  # an expert per file entry -> stacked
    "qwen3_next": _EXPERTS,  # linear attention, A_log
    "gpt_oss": _EXPERTS,  # stacked in the file too, biases, sinks, no sdpa
    "mixtral": _EXPERTS,  # w1, w2, w3 under another module's name
    "minimax": _EXPERTS,  # persistent buffers
    "deepseek_v3": {**_EXPERTS, **_LATENT},  # float32 router bias
    "deepseek_v32": {**_EXPERTS, **_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "deepseek_v4": _EXPERTS,  # integer buffers, dozens of renamings
    "longcat_flash": {**_EXPERTS, **_LATENT, "zero_expert_num": 2},  # experts without weights
    "kimi_linear": {**_EXPERTS, **_LATENT},
    "gemma3_text": {},  # two ropes, scaled embedding
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 65},
    "phi3": {},  # fused projections
    "glm4": {},
    "mamba2": {"state_size": 4, "num_heads": 8, "n_groups": 1},  # a block rescales what its layers drew
    "granitemoe": _EXPERTS,
}


# Large enough that its parameters (70 MiB, the largest 8 MiB) stand out from what else a process allocates.
LARGE = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64,
}  # fmt: skip


def make_large_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **LARGE), dtype=torch.float32)


def make_config(name: str, num_experts: int = 3) -> PreTrainedConfig:
    base = name if name not in ("llama_tied", "llama_yarn", "llama_llama3") else "llama"
    experts = {key: num_experts for key in _NUM_EXPERTS if key in ARCHITECTURES[name]}
    return AutoConfig.for_model(base, **(_SIZES | ARCHITECTURES[name] | experts))


def make_model(name: str, seed: int = 0, num_experts: int = 3) -> PreTrainedModel:
    """On the CPU, float32, as transformers alone makes it; no weight keeps a value that is the same everywhere."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(name, num_experts), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def save(model: PreTrainedModel, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder
