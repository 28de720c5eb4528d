"""Any layout equals one plain PyTorch process: losses, every gradient, norms and parameters after three steps.

Gradients are compared, not losses alone: AdamW hides a wrong scale of the experts'. Rows have lengths that no number of
ranks divides, documents end anywhere, and a row of few targets leaves ranks without any. ``test_matrix.py`` combines
everything with everything.

Peers' reports that these cases would show: E1 (uneven numbers of targets), E2, E9, E21, E26 (documents and labels under
context parallelism), E3 (norms with copies), E5, E28 (scales of experts' gradients), E10 (a micro-batch without
targets), E11 (a last, smaller window), E12 (accumulation), E13 (the balancing loss under accumulation, padding not
counted), E15 (a vocabulary that no number of ranks divides), E29 (a rank without tokens to compute).
"""

from __future__ import annotations

import pytest

from tests.llm.parallel.reference import case, check

HSDP = {"dp_replicate_size": 2, "fsdp_size": 2}
ULYSSES, RING = {"cp_size": 2, "cp_type": "ulysses"}, {"cp_size": 2, "cp_type": "ring"}
HYBRID = {"cp_size": 4, "cp_type": "hybrid", "ulysses_size": 2}

DENSE_AND_SHARDED = [
    case("qwen3", 1, accumulation=3) | {"fused_attention": True},
    case("qwen3", 2, accumulation=3, packed=True, recompute=True) | {"fused_attention": True},
    case("qwen3", 2, reshard_after_forward=False, num_to_forward_prefetch=2, num_to_backward_prefetch=0),
    case("tied_llama", 2, accumulation=3),
    case("tied_llama", 2, packed=True, fsdp_modules=["model.layers.{0}.mlp", "model.embed_tokens"]),
    case("qwen3_moe", 2, accumulation=3, aux=0.1),
    case("qwen3_moe", 2, packed=True, aux=0.1, recompute=True) | {"fused_attention": True},
    case("qwen3", 4, accumulation=3, fsdp_size=2),
    case("tied_llama", 4, packed=True, recompute=True, **HSDP),
    case("qwen3_moe", 4, accumulation=3, aux=0.1),
]
EXPERTS = [
    case("qwen3_moe", 2, accumulation=3, aux=0.1, ep_size=2),
    case("gpt_oss", 2, packed=True, recompute=True, num_to_backward_prefetch=0, ep_size=2, ep_dispatcher="fused"),
    case("lopsided", 2, packed=True, accumulation=3, ep_size=2),  # a rank without any tokens to compute (E29)
    case("qwen2_moe", 4, accumulation=3, recompute=True, recompute_mode="selective", ep_size=2),
    case("deepseek_v3", 4, packed=True, accumulation=3, ep_size=2, **HSDP),
    case("lopsided", 4, recompute=True, ep_size=4),
    case("qwen3_moe", 4, packed=True, recompute=True, recompute_mode="selective", ep_size=2, ep_dispatcher="fused")
    | {"fused_experts": True},
    case("gpt_oss", 4, accumulation=3, ep_size=4) | {"fused_experts": True},
    case("lopsided", 2, accumulation=3, ep_size=2, ep_dispatcher="fused") | {"fused_experts": True},
]
CONTEXT = [
    case("qwen3", 2, packed=True, accumulation=3, **RING),
    case("qwen3_moe", 2, accumulation=3, aux=0.1, **ULYSSES),
    case("qwen3_moe", 2, packed=True, aux=0.1, recompute=True, recompute_mode="selective", ep_size=2, **RING),
    case("gpt_oss", 2, packed=True, recompute=True, **RING),
    case("gemma2", 2, packed=True, **ULYSSES),
    case("deepseek_v3", 2, packed=True, **RING),
    case("qwen3_next", 2, packed=True, accumulation=3, aux=0.1, recompute=True, **ULYSSES),
    case("qwen3_next", 2, **RING) | {"fused_linear_attention": True},
    case("kimi_linear", 2, packed=True, **ULYSSES) | {"fused_linear_attention": True},
    case("tied_llama", 4, accumulation=3, recompute=True, **RING, **HSDP),
    case("mistral", 4, packed=True, **RING | {"cp_size": 4}),
    case("gpt_oss", 4, accumulation=3, aux=0.1, recompute=True, recompute_mode="selective", **HYBRID),
    case("qwen3_moe", 4, packed=True, aux=0.1, ep_size=2, **ULYSSES),
    case("qwen3_next", 4, packed=True, ep_size=2, **HYBRID) | {"fused_linear_attention": True},
]
CASES = [*DENSE_AND_SHARDED, *EXPERTS, *CONTEXT]
COMPILED = [
    case("qwen3", 2, packed=True, recompute=True) | {"compiled": True, "fused_attention": True},
    case("qwen3_moe", 2, packed=True, ep_size=2, cp_size=2) | {"compiled": True, "fused_experts": True},
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_process(ranks, tmp_path):
    # torchtitan#2206, speculators#942, miles#3231: losses and gradients that depend on how rows fall on ranks.
    check([case for case in CASES if case["ranks"] == ranks], ranks, tmp_path)


@pytest.mark.parametrize(
    "case", [pytest.param(COMPILED[0], marks=pytest.mark.slow), pytest.param(COMPILED[1], marks=pytest.mark.matrix)]
)
def test_compiled_layers_equal_one_process(case, tmp_path):
    check([case], 2, tmp_path, timeout=400)
