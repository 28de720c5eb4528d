"""Run by test_export.py on two ranks: export_worker.py MODEL_FOLDER OUTPUT_FOLDER OTHER_OUTPUT_FOLDER."""

import sys

from mindspeed_llm.checkpoint.export import export_hf
from mindspeed_llm.config import ModelConfig, ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.initialize import initialize_weights
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.models.skeleton import parameters_on_meta
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.memory import PeakMemory
from tests.llm.models.architectures import make_large_model

with start() as distributed:
    model = ModelFactory(ModelConfig(model_name_or_path=sys.argv[1])).create()
    parallel = ParallelConfig()
    parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
    load_weights(model, sys.argv[1])
    export_hf(model, None, sys.argv[2])

    with parameters_on_meta():
        model = make_large_model()
    parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
    initialize_weights(model, 0)
    with PeakMemory() as peak:
        export_hf(model, None, sys.argv[3])
    # A tensor on its way exists gathered, in the collective's buffer and converted; 4 of them are half of the model.
    largest = max(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert peak.growth < 4 * largest, (peak.growth, largest)
