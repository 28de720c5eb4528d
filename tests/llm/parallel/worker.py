"""Run by reference.py under torchrun: trains every case and writes what rank 0 saw.

worker.py CASES.json OUTPUT.pt
"""

import json
import sys
from functools import cache

import torch
from torch.distributed.tensor import DTensor

from mindspeed_kernels import hf
from mindspeed_llm.accumulate import count_step, forward_backward
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.optim.adamw import AdamW
from mindspeed_llm.optim.clip import clip_coefficient, gradient_norm
from mindspeed_llm.parallel.context.sharder import ContextSharder
from mindspeed_llm.parallel.mesh import Meshes, build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.parallel.cases import ADAMW, build_model, rows


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_case(case: dict, parallel: ParallelConfig, meshes: Meshes, distributed: Distributed) -> dict:
    model = build_model(case["model"])
    if case.get("fused_attention"):
        assert hf.use_attention(model).switched
    if case.get("fused_experts"):
        assert hf.apply(model, ops=["experts"]).fused("experts")
    if case.get("fused_linear_attention"):
        assert hf.apply(model, ops=["linear_attention"]).fused("linear_attention")
    sharder, cp_size = ContextSharder.of(meshes.context), parallel.cp_size
    parallelize(model, meshes, parallel, compiled=case.get("compiled", False))
    optimizer = AdamW(model.parameters(), **ADAMW)
    result: dict = {"losses": [], "norms": []}
    for step in rows(case):
        window = step[distributed.rank // cp_size :: distributed.world_size // cp_size]
        counts = count_step(window, distributed, sharder=sharder)
        loss, aux_loss = distributed.sum(forward_backward(model, window, counts, case["aux"], sharder=sharder))
        result["losses"].append((loss, aux_loss))
        result.setdefault("gradients", {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        result["norms"].append(gradient_norm(model.parameters()))
        optimizer.step(gradient_scale=clip_coefficient(result["norms"][-1], 1.0))
        optimizer.zero_grad()
    result["parameters"] = {name: full(parameter) for name, parameter in model.named_parameters()}
    return result


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    results = []
    with start() as distributed:

        @cache  # process groups are many threads: each layout has its own once
        def meshes_of(sizes: str) -> Meshes:
            return build_meshes(ParallelConfig(**json.loads(sizes)), distributed.world_size, distributed.device)

        for case in cases:
            parallel = ParallelConfig(param_dtype="fp32", **case["parallel"])
            sizes = {name: value for name, value in case["parallel"].items() if "size" in name or name == "cp_type"}
            results.append(run_case(case, parallel, meshes_of(json.dumps(sizes)), distributed))
        if distributed.is_main:
            torch.save(results, sys.argv[2])
