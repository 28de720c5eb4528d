"""Context parallelism equals one plain PyTorch process, in every combination with the other layouts.

The rows have lengths that no number of ranks divides, documents end anywhere, and a row of few targets leaves ranks
without any (peers' reports E2, E9, E10, E21, E26).
"""

from itertools import product

import pytest

from tests.llm.parallel.cases import combinations
from tests.llm.parallel.test_equivalence import case, check

ULYSSES, RING = {"cp_size": 2, "cp_type": "ulysses"}, {"cp_size": 2, "cp_type": "ring"}
HYBRID = {"cp_size": 4, "cp_type": "hybrid", "ulysses_size": 2}
HSDP = {"dp_replicate_size": 2, "fsdp_size": 2}
LAYOUTS = {
    "ulysses2": (2, ULYSSES),
    "ring2": (2, RING),
    "ring2_dp2": (4, RING),
    "ulysses2_hsdp2": (4, ULYSSES | HSDP),
    "ulysses4": (4, ULYSSES | {"cp_size": 4}),
    "ring4": (4, RING | {"cp_size": 4}),
    "hybrid4": (4, HYBRID),
}
MODELS = ["qwen3", "tied_llama", "qwen3_moe", "qwen3_next", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]
FEW = [
    case("qwen3", 2, packed=True, accumulation=3, **RING),
    case("qwen3_moe", 2, accumulation=3, aux=0.1, **ULYSSES),
    case("qwen3_moe", 2, packed=True, aux=0.1, recompute=True, recompute_mode="selective", ep_size=2, **RING),
    case("gpt_oss", 2, packed=True, recompute=True, **RING),
    case("gemma2", 2, packed=True, **ULYSSES),
    case("deepseek_v3", 2, packed=True, **RING),
    case("qwen3_next", 2, packed=True, accumulation=3, aux=0.1, recompute=True, **ULYSSES),
    case("qwen3_next", 2, **RING) | {"fused_linear_attention": True},
    case("tied_llama", 4, accumulation=3, recompute=True, **RING, **HSDP),
    case("mistral", 4, packed=True, **RING | {"cp_size": 4}),
    case("gpt_oss", 4, accumulation=3, aux=0.1, recompute=True, recompute_mode="selective", **HYBRID),
    case("qwen3_moe", 4, packed=True, aux=0.1, ep_size=2, **ULYSSES),
    case("qwen3_next", 4, packed=True, ep_size=2, **HYBRID) | {"fused_linear_attention": True},
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks, tmp_path):
    check([case for case in FEW if case["ranks"] == ranks], ranks, tmp_path)


@pytest.mark.parametrize(("model", "layout"), combinations(MODELS, list(LAYOUTS)))
def test_every_combination_equals_one_process(model, layout, tmp_path):
    ranks, sizes = LAYOUTS[layout]
    cases = []
    for accumulation, packed, recompute in product((1, 3), (False, True), (False, True)):
        aux = 0.1 if model in ("qwen3_moe", "qwen3_next") or (model == "gpt_oss" and not packed) else 0.0
        cases.append(
            case(model, ranks, accumulation=accumulation, packed=packed, aux=aux, recompute=recompute, **sizes)
        )
    check(cases, ranks, tmp_path)
