"""Run by test_checkpointer.py on two ranks: trains a tied model with uneven shards and saves it.

worker.py OUTPUT_DIR
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from mindspeed_llm.checkpoint.checkpointer import Checkpointer, TrainingState
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.checkpoint.common import Position, one_step
from tests.llm.parallel.cases import build_model

with start() as distributed:
    parallel = ParallelConfig(param_dtype="fp32")
    model = build_model("tied_llama")
    parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    one_step(model, optimizer)
    Checkpointer(Path(sys.argv[1])).save(1, TrainingState(model, optimizer, {"place": Position(1)}))
    one_step(model, optimizer)  # what a resumed run must arrive at
    after = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    if distributed.is_main:
        torch.save(after, Path(sys.argv[1]) / "after.pt")
