"""Cases of the equivalence test: the model, the rows of a few steps, and how they fall on ranks."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from mindspeed_llm.data.collate import Batch
from mindspeed_llm.data.encode import IGNORE_INDEX

VOCAB, STEPS = 65, 3  # a vocabulary that no number of ranks divides
# With an epsilon far above the gradients AdamW's steps show their scale, which it hides otherwise, and it does not turn
# rounding errors of gradients near 0 into whole steps.
ADAMW = {"lr": 1.0, "eps": 1.0}
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "attn_implementation": "sdpa",
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def _deepseek() -> DeepseekV3Config:
    return DeepseekV3Config(
        **_SHAPE | {"num_key_value_heads": 4}, **_EXPERTS, **_LATENT, n_routed_experts=4, n_shared_experts=1, n_group=2,
        topk_group=2, first_k_dense_replace=1,
    )  # fmt: skip


MODELS = {
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=False),
    "tied_llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=8, num_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**_SHAPE, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=24),
    # Groups of experts, a bias in their choice, routing weights in float32, shared experts; the first layer is dense.
    "deepseek_v3": _deepseek(),
    # Transposed and interleaved weights, biases, clamps, attention sinks.
    "gpt_oss": GptOssConfig(
        **_SHAPE | {"attn_implementation": "eager", "intermediate_size": 16},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
    ),
    "mistral": MistralConfig(**_SHAPE | {"num_key_value_heads": 1}, sliding_window=5),
    # A window in every other layer, bounded scores, a scale of its own.
    "gemma2": Gemma2Config(
        **_SHAPE | {"attn_implementation": "eager"},
        head_dim=8,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        query_pre_attn_scalar=16,
    ),
    # Convolutions and gated delta rules, with fewer key than value heads, then attention with a gate; shared experts.
    "qwen3_next": Qwen3NextConfig(
        **_SHAPE,
        **_EXPERTS,
        head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        # A first token's output is as small as its query is far from its key; normalized, its rounding errors are not.
        rms_norm_eps=1e-2,
    ),
    # Delta rules with a decay for each channel, then latent attention; no embedding of positions at all.
    "kimi_linear": KimiLinearConfig(
        **_SHAPE | {"num_key_value_heads": 4, "rms_norm_eps": 1e-2},
        **_EXPERTS | _LATENT | {"q_lora_rank": None},
        num_experts=4,
        n_shared_experts=1,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense"],
        linear_num_heads=4,
        linear_head_dim=8,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    ),
    # Every token goes to experts 0 and 1: the ranks that hold others get none.
    "lopsided": _deepseek(),
}


def build_model(name: str) -> PreTrainedModel:
    """The same float32 weights on every rank and in the reference, large enough that gradients are not tiny."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        is_factor = parameter.ndim == 1 and bool(parameter.any())  # and not a bias, nor the distance of a factor from 1
        torch.nn.init.normal_(parameter, 1.0 if is_factor else 0.0, 0.2)
        if parameter_name.endswith("A_log"):
            parameter.data -= 3  # a state that lasts for tens of tokens
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0] if name == "lopsided" else [0.1, -0.2, 0.0, 0.2]))
    return model.train()


def rows(case: dict) -> list[list[Batch]]:
    """Per step the rows of the global batch, ``accumulation x data ranks``, of uneven length and label count."""
    data_ranks = case["ranks"] // case["parallel"].get("cp_size", 1)
    generator = torch.Generator().manual_seed(11)
    steps = []
    for step in range(STEPS):
        # The last window of an epoch has fewer micro-batches.
        micro_batches = 1 if step == STEPS - 1 else case["accumulation"]
        steps.append([row(case, index, generator) for index in range(micro_batches * data_ranks)])
    return steps


def row(case: dict, index: int, generator: torch.Generator) -> Batch:
    lengths = torch.randint(3, 14, (3 if case["packed"] else 1,), generator=generator).tolist()
    ids = torch.randint(0, VOCAB, (1, sum(lengths)), generator=generator)
    labels = torch.cat([torch.tensor([*ids[0, e - n + 1 : e], IGNORE_INDEX]) for n, e in _ends(lengths)])[None]
    keep = torch.rand(labels.shape, generator=generator) < 0.2 + 0.6 * (index % 2)  # uneven over ranks
    if index == 1:
        keep[:] = False  # one row without any target: a whole micro-batch of one rank
    batch = Batch(
        input_ids=ids,
        labels=labels.masked_fill(~keep, IGNORE_INDEX),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
    )
    batch = pad_packed(batch, 3 + 2 * index) if case["packed"] else pad(batch, 16)
    batch.num_tokens = sum(lengths)
    return batch


def pad_packed(batch: Batch, missing: int) -> Batch:
    """Padding behind packed documents, a document of its own."""
    behind = {
        "input_ids": torch.full((1, missing), 7),
        "labels": torch.full((1, missing), IGNORE_INDEX),
        "position_ids": torch.arange(missing)[None],
    }
    padded = Batch({name: torch.cat([x, behind[name]], dim=1) for name, x in batch.items()})
    padded.token_mask = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (0, missing))
    return padded


def pad(batch: Batch, length: int) -> Batch:
    """Right padding with an attention mask."""
    missing = length - batch["input_ids"].shape[1]
    fill = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "attention_mask": 0}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return Batch({k: torch.nn.functional.pad(v, (0, missing), value=fill[k]) for k, v in batch.items()})


def _ends(lengths: list[int]) -> list[tuple[int, int]]:
    return [(n, sum(lengths[: i + 1])) for i, n in enumerate(lengths)]
