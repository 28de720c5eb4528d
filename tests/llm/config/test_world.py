"""Sizes that are not given are derived; those that contradict each other are told with the arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mindspeed_llm.config import Config, validate_world
from mindspeed_llm.errors import ConfigError

Load = Callable[..., Config]


@pytest.mark.parametrize(
    ("replicas", "shards", "world", "expected"),
    [
        (None, None, 1, (1, 1)),
        (None, None, 8, (1, 8)),
        (None, 4, 8, (2, 4)),
        (None, 1, 8, (8, 1)),
        (2, None, 8, (2, 4)),
        (8, None, 8, (8, 1)),
        (2, 4, 8, (2, 4)),
    ],
)
def test_sizes(replicas: int | None, shards: int | None, world: int, expected: tuple[int, int], load: Load) -> None:
    config = load(f"--parallel.dp_replicate_size={replicas}", f"--parallel.fsdp_size={shards}")
    parallel = validate_world(config, world).parallel
    assert (parallel.dp_replicate_size, parallel.fsdp_size) == expected
    assert config.parallel.fsdp_size == shards  # the given one is left alone


@pytest.mark.parametrize(
    ("replicas", "shards", "world", "message"),
    [
        (2, 3, 4, "dp_replicate_size 2 × fsdp_size 3 = 6, but the job has 4 ranks; start 6 ranks"),
        (2, 1, 1, "dp_replicate_size 2 × fsdp_size 1 = 2, but the job has 1 rank; start 2 ranks"),
        (None, 3, 4, "parallel.fsdp_size: 3 does not divide the number of ranks, 4 / 3 = 1.33"),
        (None, 16, 8, "parallel.fsdp_size: 16 does not divide the number of ranks, 8 / 16 = 0.5"),
        (3, None, 4, "parallel.dp_replicate_size: 3 does not divide the number of ranks, 4 / 3 = 1.33"),
    ],
)
def test_impossible_sizes(replicas: int | None, shards: int | None, world: int, message: str, load: Load) -> None:
    config = load(f"--parallel.dp_replicate_size={replicas}", f"--parallel.fsdp_size={shards}")
    with pytest.raises(ConfigError) as raised:
        validate_world(config, world)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        (["ep_size=4"], 8, (8, 2)),
        (["ep_size=4", "ep_fsdp_size=1", "fsdp_size=4"], 8, (4, 1)),
        (["ep_size=1", "ep_fsdp_size=1"], 8, (8, 8)),  # as the original's files have it without expert parallelism
        (["cp_size=4", "ep_size=2", "dp_replicate_size=2"], 16, (8, 4)),
    ],
)
def test_expert_sizes(options: list[str], world: int, expected: tuple[int, int], load: Load) -> None:
    parallel = validate_world(load(*(f"--parallel.{option}" for option in options)), world).parallel
    assert (parallel.fsdp_size, parallel.ep_fsdp_size) == expected


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (["ep_size=3"], 4, "parallel.ep_size: 3 does not divide fsdp_size, 4 / 3 = 1.33; start a multiple of 3 ranks"),
        (["ep_size=8", "fsdp_size=4"], 8, "parallel.ep_size: 8 does not divide fsdp_size, 4 / 8 = 0.5"),
        (["cp_size=4", "dp_replicate_size=4"], 8, "parallel.cp_size: 4 does not divide fsdp_size, 2 / 4 = 0.5"),
        (["ep_size=2", "ep_fsdp_size=4"], 4, "ep_size 2 × ep_fsdp_size 4 = 8, but fsdp_size is 4; leave out"),
    ],
)
def test_impossible_groups(options: list[str], world: int, message: str, load: Load) -> None:
    config = load(*(f"--parallel.{option}" for option in options))
    with pytest.raises(ConfigError) as raised:
        validate_world(config, world)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["cp_type=hybrid", "cp_size=4"], "ulysses_size: belongs to cp_type: hybrid, and only to it"),
        (["cp_type=ring", "cp_size=4", "ulysses_size=2"], "and only to it; cp_type is ring"),
        (["cp_type=hybrid", "cp_size=4", "ulysses_size=3"], "ulysses_size: 3 does not divide cp_size 4"),
    ],
)
def test_impossible_context(options: list[str], message: str, load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load(*(f"--parallel.{option}" for option in options))
    assert message in str(raised.value)
