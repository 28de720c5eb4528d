"""Does the configuration fit the number of ranks?"""

from __future__ import annotations

from mindspeed_llm.config.schema import Config
from mindspeed_llm.errors import ConfigError


def validate_world(config: Config, world_size: int) -> Config:
    """``config`` with both sizes of the mesh set, so that ``dp_replicate_size × fsdp_size == world_size``.

    A size that is not given is derived. Raises ConfigError, with the arithmetic, if the given ones cannot be met.
    """
    replicas, shards = config.parallel.dp_replicate_size, config.parallel.fsdp_size
    if replicas is not None and shards is not None and replicas * shards != world_size:
        product = replicas * shards
        raise ConfigError(
            f"parallel: dp_replicate_size {replicas} × fsdp_size {shards} = {product}, but the job has "
            f"{_ranks(world_size)}; start {_ranks(product)}, or leave out one of the two sizes"
        )
    for name, size in (("dp_replicate_size", replicas), ("fsdp_size", shards)):
        if size is not None and world_size % size:
            raise ConfigError(
                f"parallel.{name}: {size} does not divide the number of ranks, {world_size} / {size} = "
                f"{world_size / size:.3g}; start a multiple of {_ranks(size)}, or leave out {name}"
            )
    if replicas is None:
        replicas = world_size // (shards or world_size)
    derived = {"dp_replicate_size": replicas, "fsdp_size": world_size // replicas}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=derived)})


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"
