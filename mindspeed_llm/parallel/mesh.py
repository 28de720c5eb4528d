"""Which rank does what: the device meshes of a job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_llm.config import ParallelConfig


@dataclass(frozen=True)
class Meshes:
    """Three views of the same ranks; the last dimension of each is that of neighbouring ranks.

    The 16 ranks of ``dp_replicate_size: 2, ep_size: 4, cp_size: 4, cp_type: hybrid, ulysses_size: 2``, so that
    ``fsdp_size`` is 8 and ``efsdp`` is 2, are::

                             one copy of the parameters           the other copy
        rank                 0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
        dense    fsdp        0  1  2  3    4  5  6  7    0  1  2  3    4  5  6  7
        expert   efsdp       0  0  0  0    1  1  1  1    0  0  0  0    1  1  1  1
                 ep          0  1  2  3    0  1  2  3    0  1  2  3    0  1  2  3
        context  batch       0  0  0  0    1  1  1  1    2  2  2  2    3  3  3  3
                 ring        0  0  1  1    0  0  1  1    0  0  1  1    0  0  1  1
                 ulysses     0  1  0  1    0  1  0  1    0  1  0  1    0  1  0  1

    Ranks with equal coordinates but for one share in a collective of that one dimension: tokens travel to their
    experts along ``ep``, keys and values along ``ring``, heads along ``ulysses``; gradients are reduce-scattered along
    ``fsdp`` or ``efsdp`` and all-reduced along ``dp_replicate``. Ranks of one ``batch`` hold parts of the same rows.
    """

    dense: DeviceMesh
    """``(dp_replicate, fsdp)``, of every parameter that is not an expert's."""
    expert: DeviceMesh | None
    """``(dp_replicate, efsdp, ep)``, of the experts; None without expert parallelism."""
    context: DeviceMesh | None
    """``(batch, ring, ulysses)``, of the rows of the data; None without context parallelism."""


def build_meshes(parallel: ParallelConfig, world_size: int, device: torch.device) -> Meshes:
    """The meshes of a job whose sizes ``validate_world`` has found to fit the number of ranks. Collective."""
    fsdp = parallel.fsdp_size or world_size // (parallel.dp_replicate_size or 1)
    replicas, efsdp = world_size // fsdp, fsdp // parallel.ep_size

    ulysses = {"ulysses": parallel.cp_size, "ring": 1, "hybrid": parallel.ulysses_size or 1}[parallel.cp_type]

    def mesh(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    dense = mesh(dp_replicate=replicas, fsdp=fsdp)
    expert = context = None
    if parallel.ep_size > 1:
        expert = mesh(dp_replicate=replicas, efsdp=efsdp, ep=parallel.ep_size)
    if parallel.cp_size > 1:
        context = mesh(batch=world_size // parallel.cp_size, ring=parallel.cp_size // ulysses, ulysses=ulysses)
    return Meshes(dense, expert, context)
