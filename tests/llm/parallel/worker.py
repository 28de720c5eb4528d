"""Run by test_equivalence.py under torchrun: trains every case and writes what rank 0 saw.

worker.py CASES.json OUTPUT.pt
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

from mindspeed_kernels import hf
from mindspeed_llm.accumulate import count_step, forward_backward
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.optim.adamw import AdamW
from mindspeed_llm.optim.clip import clip_coefficient, gradient_norm
from mindspeed_llm.parallel.context.sharder import ContextSharder
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.parallel.cases import ADAMW, build_model, rows


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_case(case: dict, distributed: Distributed) -> dict:
    parallel = ParallelConfig(param_dtype="fp32", **case["parallel"])
    model = build_model(case["model"])
    if case.get("fused_attention"):
        assert hf.use_attention(model).switched
    if case.get("fused_experts"):
        assert hf.apply(model, ops=["experts"]).fused("experts")
    if case.get("fused_linear_attention"):
        assert hf.apply(model, ops=["linear_attention"]).fused("linear_attention")
    meshes = build_meshes(parallel, distributed.world_size, distributed.device)
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
    with start() as distributed:
        results = [run_case(case, distributed) for case in cases]
        if distributed.is_main:
            torch.save(results, sys.argv[2])
