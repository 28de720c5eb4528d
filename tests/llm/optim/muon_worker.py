"""Run by test_muon.py: two steps of Muon on sharded parameters, stacks of experts among them.

muon_worker.py OUTPUT.pt
"""

import sys

import torch
from torch.distributed.tensor import distribute_tensor

from mindspeed_llm.config import ParallelConfig, TrainingConfig
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.optim.optimizer import OptimizerFactory
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.parallel.cases import build_model

LAYOUTS = [{"dp_replicate_size": 2}, {"ep_size": 2}]  # of four ranks


def take_steps(layout: dict, distributed: Distributed) -> dict[str, torch.Tensor]:
    parallel = ParallelConfig(param_dtype="fp32", **layout)
    model = build_model("qwen3_moe")
    parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
    optimizer = OptimizerFactory(TrainingConfig(output_dir="unused", optimizer="muon", lr=0.1)).create(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step(gradient_scale=0.5)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    with start() as distributed:
        results = [take_steps(layout, distributed) for layout in LAYOUTS]
        if distributed.is_main:
            torch.save(results, sys.argv[1])
