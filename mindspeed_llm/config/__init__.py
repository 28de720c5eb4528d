"""Typed configuration: ``load_config(path, overrides) -> Config``.

``schema`` and ``data_schema`` have every key; ``source`` reads YAML and overrides, ``load`` checks them; ``original``
lists the keys of MindSpeed LLM that are no keys here.
"""

from mindspeed_llm.config.data_schema import DataConfig, DatasetSource
from mindspeed_llm.config.load import load_config
from mindspeed_llm.config.problems import unknown_key
from mindspeed_llm.config.schema import (
    Config,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
    TrainingConfig,
)
from mindspeed_llm.config.source import split_overrides
from mindspeed_llm.config.world import validate_world

__all__ = [
    "Config",
    "DataConfig",
    "DatasetSource",
    "ModelConfig",
    "OptimizationConfig",
    "ParallelConfig",
    "TrainingConfig",
    "load_config",
    "split_overrides",
    "unknown_key",
    "validate_world",
]
