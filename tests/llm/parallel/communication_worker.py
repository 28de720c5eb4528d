"""Run by test_communication.py under torchrun: counts what a step sends, and looks at when it is sent.

communication_worker.py CASES.json
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from mindspeed_kernels import hf
from mindspeed_llm.accumulate import count_step, forward_backward
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.parallel import traffic
from mindspeed_llm.parallel.context.sharder import ContextSharder
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from mindspeed_llm.parallel.structure import expert_modules, num_experts
from tests.llm.parallel.bytes_sent import BytesSent
from tests.llm.parallel.cases import build_model, rows


class Rows:
    """Tokens that leave this rank and those that come in every call of the experts, told from the routers' choices."""

    def __init__(self, model: PreTrainedModel, ep_size: int, distributed: Distributed) -> None:
        self.ep_size, self.distributed = ep_size, distributed
        self.calls: list[list[int]] = []  # rows to each rank of the group
        for experts in expert_modules(model) if ep_size > 1 else []:
            experts.register_forward_pre_hook(self._look)

    def _look(self, experts: torch.nn.Module, args: tuple) -> None:
        owner = args[1] // (num_experts(experts) // self.ep_size)
        self.calls.append([int((owner == rank).any(1).sum()) for rank in range(self.ep_size)])

    def sent_and_received(self, num_calls: int) -> list[tuple[int, int]]:
        """Of the first calls, which are those of the forward pass."""
        place = self.distributed.rank % self.ep_size
        first = self.distributed.rank - place
        group = self.distributed.gather(self.calls)[first : first + self.ep_size]
        return [
            (
                sum(group[place][call]) - group[place][call][place],
                sum(other[call][place] for other in group) - group[place][call][place],
            )
            for call in range(num_calls)
        ]


def check_bytes(case: dict, distributed: Distributed) -> None:
    parallel = ParallelConfig(param_dtype="fp32", **case["parallel"])
    model = build_model(case["model"])
    if case.get("fused_experts"):
        assert hf.apply(model, ops=["experts"]).fused("experts")
    meshes = build_meshes(parallel, distributed.world_size, distributed.device)
    sharder = ContextSharder.of(meshes.context)
    parallelize(model, meshes, parallel)
    routed = Rows(model, parallel.ep_size, distributed)
    window = rows(case)[0][distributed.rank // parallel.cp_size :: distributed.world_size // parallel.cp_size]
    counts = count_step(window, distributed, sharder=sharder)
    with BytesSent() as sent:
        forward_backward(model, window, counts, sharder=sharder)

    layers, size = model.config.num_hidden_layers, 4
    num_calls = len(window) * layers * (parallel.ep_size > 1)
    if parallel.recompute:  # the layers of a micro-batch are called again, from the last one on
        routed.calls = [call for i, call in enumerate(routed.calls) if i // layers % 2 == 0]
    tokens = [sharder.shard_batch(batch)["input_ids"].numel() for batch in window]
    expected = {
        "parameters": len(window) * traffic.parameter_bytes(model, parallel),
        "gradients": traffic.gradient_bytes(model, parallel),
        "tokens": sum(traffic.expert_bytes(model, parallel, *r, size) for r in routed.sent_and_received(num_calls))
        + sum(layers * traffic.attention_bytes(model, parallel, number, size) for number in tokens),
    }
    kinds = sent.by_kind
    counted = {
        "parameters": kinds["all_gather"],
        "gradients": kinds["reduce_scatter"] + kinds["all_reduce"],
        "tokens": kinds["all_to_all"] + kinds["send"],
    }
    assert counted == expected, f"{case}: {counted} counted, {expected} expected"


def check_prefetch(prefetch: int, distributed: Distributed) -> None:
    """When is the next unit gathered, seen from the unit that computes?"""
    parallel = ParallelConfig(param_dtype="fp32", num_to_forward_prefetch=prefetch, num_to_backward_prefetch=prefetch)
    model = build_model("qwen3")
    parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
    ids = torch.arange(16)[None]
    model(ids, use_cache=False).logits.sum().backward()  # sets FSDP up
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(ids, use_cache=False).logits.sum().backward()
    starts: dict[str, list[float]] = {}
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        starts.setdefault(event.name, []).append(event.time_range.start)

    def at(what: str, unit: str, place: int = 0) -> float:
        return starts[f"FSDP::{what} ({unit})"][place]

    units = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    for unit, following in itertools.pairwise(units):
        is_ahead = at("pre_forward", unit) < at("all_gather", following) < at("post_forward", unit)
        assert is_ahead == (prefetch > 0), f"{following} in the forward pass of {unit}"
    if prefetch:  # without an order of its own FSDP gathers one unit ahead in backward
        for unit, following in itertools.pairwise(units[::-1]):
            computed = at("post_backward_accumulate", unit)
            assert at("pre_backward", unit) < at("all_gather", following, 1) < computed, f"{following} behind {unit}"


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    with start() as distributed:
        for case in cases:
            check_bytes(case, distributed)
        for prefetch in (1, 0):
            check_prefetch(prefetch, distributed)
        dist.barrier()
