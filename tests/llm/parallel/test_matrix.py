"""Everything combined with everything: models, layouts, accumulation, packing and recomputation.

With ``-m matrix`` each pair of a model and a layout comes with all eight of the others. The slow tests take every
layout of several ranks. Kimi Linear is in ``test_equivalence.py`` and ``context/`` only.
"""

from itertools import product

import pytest

from tests.llm.parallel.reference import case, check
from tests.llm.parallel.test_equivalence import HSDP, HYBRID, RING, ULYSSES

SHARDED = {"fsdp1": (1, {}), "fsdp2": (2, {}), "fsdp4": (4, {}), "hsdp2": (4, HSDP)}
CONTEXT = {
    "ulysses2": (2, ULYSSES),
    "ring2": (2, RING),
    "ring2_dp2": (4, RING),
    "ulysses2_hsdp2": (4, ULYSSES | HSDP),
    "ulysses4": (4, ULYSSES | {"cp_size": 4}),
    "ring4": (4, RING | {"cp_size": 4}),
    "hybrid4": (4, HYBRID),
}
EXPERTS = {
    "ep2": (2, {"ep_size": 2}),
    "ep2_efsdp2": (4, {"ep_size": 2}),
    "ep4": (4, {"ep_size": 4}),
    "hsdp2_ep2": (4, HSDP | {"ep_size": 2}),
}
BOTH = {
    "ulysses2_ep2": (2, ULYSSES | {"ep_size": 2}),
    "ring2_dp2_ep4": (4, RING | {"ep_size": 4}),
    "ring2_hsdp2_ep2": (4, RING | HSDP | {"ep_size": 2}),
    "ring4_ep2_efsdp2": (4, RING | {"cp_size": 4, "ep_size": 2}),
    "hybrid4_ep4": (4, HYBRID | {"ep_size": 4}),
}
LAYOUTS = SHARDED | CONTEXT | EXPERTS | BOTH

DENSE_MODELS = ["qwen3", "tied_llama", "mistral", "gemma2"]
MOE_MODELS = ["qwen3_moe", "qwen2_moe", "qwen3_next", "gpt_oss", "deepseek_v3", "lopsided"]
PAIRS = [
    *product(DENSE_MODELS, [*SHARDED, *CONTEXT]),
    *product(MOE_MODELS, LAYOUTS),
]
REST = list(product((1, 3), (False, True), (False, True)))  # accumulation, packed, recompute


def combination(model: str, layout: str, accumulation: int, packed: bool, recompute: bool) -> dict:
    ranks, sizes = LAYOUTS[layout]
    # gpt_oss lets packed documents see each other; the balancing loss of the reference is that of a row's documents.
    has_aux = model in ("qwen3_moe", "qwen3_next") or (model == "gpt_oss" and not packed)
    options = {"aux": 0.1 if has_aux else 0.0, "recompute": recompute}
    return case(model, ranks, accumulation=accumulation, packed=packed, **options, **sizes)


def covering(ranks: int) -> list[dict]:
    """Every layout of ``ranks`` ranks, each with two models and two of the rest."""
    cases = []
    for index, layout in enumerate(name for name, (n, _) in LAYOUTS.items() if n == ranks):
        models = [model for model, other in PAIRS if other == layout]
        cases += [
            combination(models[(index + 3 * i) % len(models)], layout, *REST[(index + 5 * i) % 8]) for i in (0, 1)
        ]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_equals_one_process(ranks, tmp_path):
    check(covering(ranks), ranks, tmp_path, timeout=400)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", DENSE_MODELS + MOE_MODELS)
def test_every_combination_equals_one_process(model, ranks, tmp_path):
    layouts = [layout for name, layout in PAIRS if name == model and LAYOUTS[layout][0] == ranks]
    check([combination(model, layout, *rest) for layout, rest in product(layouts, REST)], ranks, tmp_path, timeout=1800)
