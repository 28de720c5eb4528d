"""What a step sends, byte for byte, and that parameters are gathered while others compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import launch
from tests.llm.parallel.reference import case

WORKER = str(Path(__file__).with_name("communication_worker.py"))
RING, ULYSSES = {"cp_size": 2, "cp_type": "ring"}, {"cp_size": 2, "cp_type": "ulysses"}
SELECTIVE = {"recompute": True, "recompute_mode": "selective"}
CASES = [
    case("qwen3", 2, accumulation=3),
    case("tied_llama", 2, accumulation=3, reshard_after_forward=False, recompute=True),
    case("qwen3_moe", 2, accumulation=3, ep_size=2, recompute=True),
    case("qwen3_moe", 2, packed=True, ep_size=2, ep_dispatcher="fused", **RING, **SELECTIVE),
    case("qwen3_moe", 2, packed=True, ep_size=2, **RING, **SELECTIVE) | {"fused_experts": True},
    case("qwen3", 2, packed=True, **RING),
    case("qwen3", 2, packed=True, recompute=True, **RING),
    case("qwen3", 2, packed=True, recompute=True, **ULYSSES),
    case("qwen3", 4, accumulation=3, dp_replicate_size=2, fsdp_size=2),
    case("qwen3_moe", 4, accumulation=3, ep_size=2),
    case("qwen3_moe", 4, packed=True, ep_size=4, **ULYSSES | {"cp_size": 4}),
    case("qwen3_moe", 4, packed=True, ep_size=2, dp_replicate_size=2, fsdp_size=2, **ULYSSES, **SELECTIVE),
    case("qwen3", 4, packed=True, **RING | {"cp_size": 4}),
    case("qwen3", 4, packed=True, recompute=True, cp_size=4, cp_type="hybrid", ulysses_size=2),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_sends_what_the_formulas_say(ranks, tmp_path):
    """And the trace of a step: the next unit's parameters are gathered before the present one has computed."""
    (tmp_path / "cases.json").write_text(json.dumps([case for case in CASES if case["ranks"] == ranks]))
    finished = launch([WORKER, str(tmp_path / "cases.json")], ranks)
    assert finished.returncode == 0, finished.stderr
