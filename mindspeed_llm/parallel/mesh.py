"""Which rank does what: the device mesh of a job."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_llm.config import ParallelConfig


def build_mesh(parallel: ParallelConfig, world_size: int, device: torch.device) -> DeviceMesh:
    """The dense mesh ``(dp_replicate, fsdp)``; neighbouring ranks shard, distant ones replicate.

    With 8 ranks and ``fsdp_size: 4``, parameters are cut in four and held twice::

                        fsdp →
        dp_replicate    rank 0   rank 1   rank 2   rank 3
             ↓          rank 4   rank 5   rank 6   rank 7

    Gradients are reduce-scattered along a row and all-reduced along a column. ``validate_world`` has already made
    sure that the sizes multiply to the world size.
    """
    fsdp_size = parallel.fsdp_size or world_size
    return init_device_mesh(device.type, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("dp_replicate", "fsdp"))
