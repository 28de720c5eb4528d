"""Run by test_muon.py: two steps of Muon on sharded parameters, stacks of experts among them.

muon_worker.py OUTPUT.pt EP_SIZE
"""

import sys

import torch
from torch.distributed.tensor import distribute_tensor

from mindspeed_llm.config import ParallelConfig, TrainingConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.optim.optimizer import OptimizerFactory
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.parallel.cases import build_model

with start() as distributed:
    ep_size = int(sys.argv[2])
    replicas = 2 if distributed.world_size == 4 and ep_size == 1 else 1
    parallel = ParallelConfig(param_dtype="fp32", dp_replicate_size=replicas, ep_size=ep_size)
    model = build_model("qwen3_moe")
    parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
    optimizer = OptimizerFactory(TrainingConfig(output_dir="unused", optimizer="muon", lr=0.1)).create(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step(gradient_scale=0.5)
    result = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if distributed.is_main:
        torch.save(result, sys.argv[1])
