"""Typed configuration: ``load_config(path, overrides) -> Config``."""

from mindspeed_llm.config.load import load_config
from mindspeed_llm.config.schema import (
    Config,
    DataConfig,
    DatasetSource,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
    TrainingConfig,
)

__all__ = [
    "Config",
    "DataConfig",
    "DatasetSource",
    "ModelConfig",
    "OptimizationConfig",
    "ParallelConfig",
    "TrainingConfig",
    "load_config",
]
