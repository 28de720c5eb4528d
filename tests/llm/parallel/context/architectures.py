"""Tiny models of every architecture for causal language modelling in transformers that a few common sizes make tiny."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LENGTHS = [7, 11, 4]
"""Of the documents in the one packed row."""

_EQUAL = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe cwm deepseek_v2
    deepseek_v3 diffllama dory dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
    granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 llama mellum minicpm3 minimax_m2
    ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe
    opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next sarvam_mla sarvam_moe
    smollm3 solar_open stablelm starcoder2 vaultgemma youtu lfm3
"""
EQUAL = _EQUAL.split()

REFUSED = {
    "bart": "encoder_attn .* did not attend through",
    "bert": "attention that is not causal",
    "bloom": "has no attention that goes through",
    "ctrl": "does not use the position ids",
    "deepseek_v32": "layers of the type indexed_attention",
    "falcon": "has no attention that goes through",
    "falcon_h1": "layers of the type hybrid",
    "jamba": "mixes tokens in other ways",
    "llama4_text": "layers of the type chunked_attention",
    "mamba": "only a mask can express",
    "minimax": "has no attention that goes through",
    "mpt": "has no attention that goes through",
    "nemotron_h": "has no attention that goes through",
    "recurrent_gemma": "mixes neighbouring tokens outside of attention",
    "rwkv": "has no attention that goes through",
    "seed_oss": "has attention_dropout 0.1",
    "xlnet": "has no attention that goes through",
}
"""Why, as a pattern in the message."""

_HIDDEN = dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32)
_INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 48)
_LAYERS = dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers"), 2)
_HEADS = dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads"), 4)
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 3)
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8,
}  # fmt: skip
_SIZES = _HIDDEN | _INNER | _LAYERS | _HEADS | _EXPERTS | _LATENT | _LINEAR | {
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 5,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_intermediate_size": 20, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layer_types": None,
}  # fmt: skip
_SPECIAL = {
    name: {"layer_types": [kind, "full_attention"]}
    for kind, names in {
        "linear_attention": [
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "olmo_hybrid",
            "lara_mini",
            "kimi_linear",
        ],
        "conv": ["lfm2", "lfm3"],
    }.items()
    for name in names
}


def build(name: str) -> PreTrainedModel:
    """In float32, without dropout; no weight has a value that is the same everywhere."""
    known = AutoConfig.for_model(name).to_dict()
    sizes = {key: size for key, size in _SIZES.items() if key in known} | _SPECIAL.get(name, {})
    if "kv_lora_rank" in known:  # latent attention makes keys for all heads
        sizes["num_key_value_heads"] = 4
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=65, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
