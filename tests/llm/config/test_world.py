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
