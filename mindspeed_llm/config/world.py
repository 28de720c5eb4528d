"""Does the configuration fit the number of ranks?"""

from __future__ import annotations

from mindspeed_llm.config.schema import Config, ParallelConfig
from mindspeed_llm.errors import ConfigError


def validate_world(config: Config, world_size: int) -> Config:
    """``config`` with every size of the meshes set, so that ``dp_replicate_size × fsdp_size == world_size``,
    ``ep_size × ep_fsdp_size == fsdp_size``, and ``cp_size`` divides ``fsdp_size``.

    A size that is not given is derived. Raises ConfigError, with the arithmetic, if the given ones cannot be met.
    """
    parallel = config.parallel
    sizes = _copies_and_shards(parallel.dp_replicate_size, parallel.fsdp_size, world_size)
    sizes["ep_fsdp_size"] = _expert_shards(parallel, sizes["fsdp_size"])
    _check_divides("cp_size", parallel.cp_size, sizes["fsdp_size"])
    return config.model_copy(update={"parallel": parallel.model_copy(update=sizes)})


def _copies_and_shards(replicas: int | None, shards: int | None, world_size: int) -> dict[str, int]:
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
    return {"dp_replicate_size": replicas, "fsdp_size": world_size // replicas}


def _expert_shards(parallel: ParallelConfig, fsdp_size: int) -> int:
    experts, given = parallel.ep_size, parallel.ep_fsdp_size
    if experts == 1:
        return fsdp_size  # the original's files give a 1 here where it means nothing
    _check_divides("ep_size", experts, fsdp_size)
    if given is not None and experts * given != fsdp_size:
        raise ConfigError(
            f"parallel: ep_size {experts} × ep_fsdp_size {given} = {experts * given}, but fsdp_size is {fsdp_size}; "
            f"leave out ep_fsdp_size, which is fsdp_size / ep_size = {fsdp_size // experts}"
        )
    return fsdp_size // experts


def _check_divides(name: str, size: int, fsdp_size: int) -> None:
    """The groups of expert and of context parallelism lie within one copy of the parameters."""
    if fsdp_size % size:
        raise ConfigError(
            f"parallel.{name}: {size} does not divide fsdp_size, {fsdp_size} / {size} = {fsdp_size / size:.3g}; "
            f"start a multiple of {_ranks(size)} for each copy of the parameters"
        )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"
