"""Run by test_export.py on two ranks: export_worker.py MODEL_FOLDER OUTPUT_FOLDER."""

import sys

from mindspeed_llm.checkpoint.export import export_hf
from mindspeed_llm.config import ModelConfig, ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.parallel.mesh import build_mesh
from mindspeed_llm.parallel.parallelize import parallelize

with start() as distributed:
    model = ModelFactory(ModelConfig(model_name_or_path=sys.argv[1])).create()
    parallel = ParallelConfig()
    parallelize(model, build_mesh(parallel, distributed.world_size, distributed.device), parallel)
    load_weights(model, sys.argv[1])
    export_hf(model, None, sys.argv[2])
