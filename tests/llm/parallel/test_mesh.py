"""The meshes are those of the drawing in their documentation, seen from every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.mesh import Meshes, build_meshes


def meshes_of(rank: int, world_size: int, **sizes) -> Meshes:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        return build_meshes(ParallelConfig(**sizes), world_size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_sixteen_ranks():
    sizes = {"dp_replicate_size": 2, "ep_size": 4, "cp_size": 4, "cp_type": "hybrid", "ulysses_size": 2}
    for rank in range(16):
        meshes = meshes_of(rank, 16, **sizes)
        assert meshes.dense.mesh_dim_names == ("dp_replicate", "fsdp")
        assert meshes.dense.get_coordinate() == (rank // 8, rank % 8)
        assert meshes.expert.mesh_dim_names == ("dp_replicate", "efsdp", "ep")
        assert meshes.expert.get_coordinate() == (rank // 8, rank // 4 % 2, rank % 4)
        assert meshes.context.mesh_dim_names == ("batch", "ring", "ulysses")
        assert meshes.context.get_coordinate() == (rank // 4, rank // 2 % 2, rank % 2)


def test_absent_dimensions():
    meshes = meshes_of(0, 4)
    assert meshes.dense.shape == (1, 4)
    assert meshes.expert is None
    assert meshes.context is None


def test_kinds_of_context_parallelism():
    assert meshes_of(0, 4, cp_size=4, cp_type="ulysses").context.shape == (1, 1, 4)
    assert meshes_of(0, 4, cp_size=2, cp_type="ring", fsdp_size=2).context.shape == (2, 2, 1)
