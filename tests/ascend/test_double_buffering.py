"""Queues have two buffers, and copies and computations do overlap.

The twin counts for every queue how often a buffer was filled while nothing had the pipe that fills it wait for what the
pipe that empties them does with the buffer before: by the flags, barriers and waits that were executed, not by the
order in which the twin runs instructions. With one buffer that never happens.
"""

from __future__ import annotations

import re

import pytest
import torch

from mindspeed_kernels.ascend_twin import AscendTwin
from tests.ascend.native import ROOT, kernels
from tests.ascend.test_barriers import KERNELS
from tests.kernels.compare import KERNEL_DTYPES

# What is loaded or made once and kept: the weight of whole rows, the sums of its gradient, zeros.
KEPT = {("rms_norm.h", "queue_"), ("rms_norm_backward.h", "sumQueue_"), ("moe_permute.h", "zerosQueue_")}


def name(site: str) -> tuple[str, str]:
    """The kernel's file and the queue that is initialised at a place of it."""
    file, line = site.split(":")
    text = (ROOT / "csrc" / "ascend" / "kernels" / file).read_text().splitlines()[int(line) - 1]
    match = re.search(r"InitBuffer\((\w+),", text)
    assert match, text
    return file, match[1]


def waits(twin: AscendTwin) -> dict[str, int]:
    """Of each queue, how often a buffer could not be filled while the one before it was emptied; the first one counts,
    as there is none before it."""
    queues = {name(site): use for site, use in twin.report.queues.items()}
    assert len({queue for _, queue in queues}) == len(queues), "queues of one name would hide each other"
    return {queue[1]: use["filled"] - use["overlapped"] for queue, use in queues.items() if queue not in KEPT}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_queue_has_two_buffers(kernel: str):
    for case in KERNELS[kernel]():
        twin = kernels()
        case(twin)
        single = {name(site) for site, use in twin.report.queues.items() if use["buffers"] < 2}
        assert single <= KEPT, single


def independent_tiles(twin: AscendTwin):
    """Calls on one core, each with many tiles, of which none waits for another."""
    x, weight, rstd = torch.randn(600, 256).half(), torch.ones(256), torch.ones(600)
    yield twin.rms_norm(x, weight, eps=1e-6, round_before_weight=True, residual=x)
    yield twin.rms_norm_backward(x, x, weight, rstd, round_before_weight=True, grad_sum=x)
    both = torch.randn(900, 256).half()
    yield twin.swiglu(both)
    yield twin.swiglu_backward(both[:, :128].contiguous(), both)
    q, cos = torch.randn(1, 32, 6, 128).half(), torch.randn(1, 6, 128).half()
    yield twin.rotary(q, q, cos, cos)
    x, source, weights = torch.randn(30, 64).half(), torch.randperm(60), torch.rand(30, 2)
    y, position = torch.randn(60, 64).half(), source.argsort().view(30, 2)
    yield twin.moe_permute(x, source, 2)
    yield twin.moe_unpermute(y, position, weights)
    yield twin.moe_unpermute_backward(x, y, source, weights)
    x, weight, ends = torch.randn(300, 600).half(), torch.randn(2, 200, 600).half(), torch.tensor([130, 300]).int()
    yield twin.grouped_gemm(x, weight, ends)
    yield twin.grouped_gemm_weight_gradient(torch.randn(300, 200).half(), x, ends)


def test_only_the_first_tile_waits():
    torch.manual_seed(0)
    twin = kernels(blocks=1)
    for _ in independent_tiles(twin):
        counts = waits(twin)
        assert counts.pop("numbersQueue_", 2) == 2  # the sums of other cores, for which all wait
        assert set(counts.values()) == {1}, counts


def test_one_buffer_would_make_all_wait():
    """The count can tell."""
    torch.manual_seed(0)
    twin = kernels(blocks=1, max_buffers=1)
    for _ in independent_tiles(twin):
        assert all(use["overlapped"] == 0 and use["filled"] > 0 for use in twin.report.queues.values())


@pytest.mark.parametrize("hidden", [7168, 20000])
def test_parts_of_rows(hidden: int):
    """What is copied in, with two buffers for the weight too. Results take turns with sums that are stored."""
    x, weight, rstd = torch.randn(4, hidden).half(), torch.ones(hidden), torch.ones(4)
    twin = kernels(blocks=1)
    twin.rms_norm(x, weight, eps=1e-6, round_before_weight=True, residual=x)
    counts = waits(twin)
    assert (counts["xQueue_"], counts["residualQueue_"]) == (1, 1)
    twin.rms_norm_backward(x, x, weight, rstd, round_before_weight=True, grad_sum=x)
    counts = waits(twin)
    assert (counts["gradYQueue_"], counts["xQueue_"], counts["gradXQueue_"]) == (1, 1, 1)


def attention(twin: AscendTwin, dtype: torch.dtype, dim: int):
    """Two blocks of queries that see four tiles of keys each; backward also four blocks of keys and two of queries."""
    q, kv, statistics = torch.randn(256, 1, dim).to(dtype), torch.randn(512, 1, dim).to(dtype), torch.ones(1, 256)
    yield twin.flash_attention(q, kv, kv, causal=False)
    yield twin.flash_attention_backward(q, None, q, kv, kv, q, statistics, causal=False)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_attention(dtype: torch.dtype, dim: int):
    """From the first chunk of a task to its last, over all its tiles, the next scores are copied in while these are
    computed with. Once per tile a vector core has to wait for products, which are made of all its probabilities.
    """
    twin = kernels(blocks=1)
    calls = attention(twin, dtype, dim)
    next(calls)
    tasks, tiles = 2 * 2, 2 * (2 * 4)  # of both vector cores
    counts = {"scoresQueue_": tasks, "probabilitiesQueue_": tiles, "productsQueue_": tiles}
    assert waits(twin).items() >= (counts | {"outQueue_": tasks, "logsumexpQueue_": tasks}).items()
    next(calls)
    tasks, tiles, tiles_of_keys = 2 * (2 + 4), 2 * (2 * 4 + 4 * 2), 2 * (4 * 2)
    counts = {"scoresQueue_": tasks, "probabilitiesQueue_": tiles_of_keys, "scoreGradientsQueue_": tiles}
    assert waits(twin).items() >= (counts | {"productsQueue_": tiles, "outQueue_": tasks}).items()
    assert all(2 * use["overlapped"] >= use["filled"] for use in twin.report.queues.values())


def test_attention_has_two_chunks_in_flight():
    """With one buffer there is nowhere to copy the next one to."""
    q, statistics = torch.randn(256, 1, 64), torch.ones(1, 256)
    twin = kernels(max_buffers=1)
    with pytest.raises(RuntimeError, match="all 1 buffers of the queue are in use"):
        twin.flash_attention(q, q, q)
    with pytest.raises(RuntimeError, match="all 1 buffers of the queue are in use"):
        twin.flash_attention_backward(q, None, q, q, q, q, statistics)
