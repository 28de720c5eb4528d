"""The report on the kernels' costs."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ascend_report import Chip, cube_costs, table, vector_costs
from tests.ascend.native import build

LIBRARY = "_ascend_twin.so"


def test_vector_kernels_move_their_operands_once():
    """And the weight of a norm, or its partial gradient, once per core, of which each has 16 rows here; the row of
    a token that goes to two experts for each of them."""
    twice = {"moe_permute": 4 / 3, "moe_unpermute backward": 6 / 5}
    costs = list(vector_costs(build() / LIBRARY, Chip(), tokens=640))
    assert len(costs) == 10
    for cost in costs:
        most = twice.get(cost.kernel, 1.2 if "norm" in cost.kernel else 1.001)
        assert 1.0 <= cost.bytes / cost.least_bytes < most, cost.kernel
        assert cost.seconds["cube"] == 0.0
    lines = table(costs).splitlines()
    assert len(lines) == 11
    assert "swiglu backward" in lines[5]


def test_cube_kernels_count_their_products():
    chip = Chip()
    costs = {cost.kernel: cost for cost in cube_costs(build() / LIBRARY, chip, tokens=512, head_dim=16)}
    forward = costs["flash_attention forward"]
    assert forward.counters["cube_flops"] == 2 * 2 * 128 * (256 + 64) * 16  # two products with the visible keys
    # Three products along the keys of all 128 queries, four along the queries of 128 keys each.
    backward = costs["flash_attention backward"]
    along_keys, along_queries = 128 * 320, 128 * 128 + 128 * 128 + 64 * 64
    assert backward.counters["cube_flops"] == 2 * (3 * along_keys + 4 * along_queries) * 16
    for kernel in ("grouped_gemm", "grouped_gemm weight gradient"):
        gemm = costs[kernel]
        flops = 2 * 512 * 4096 * 14336
        assert gemm.seconds["cube"] == pytest.approx(flops / chip.cube_flops_per_second(torch.bfloat16))
        assert gemm.bound == "cube"


def test_float32_takes_the_cube_four_times_as_long():
    both = [
        {cost.kernel: cost.seconds["cube"] for cost in cube_costs(build() / LIBRARY, Chip(), 128, head_dim=16, **dtype)}
        for dtype in ({}, {"dtype": torch.float32})
    ]
    for kernel, seconds in both[0].items():
        assert both[1][f"{kernel}, float32"] == pytest.approx(4 * seconds)
