"""Run by test_clip.py on four ranks: one norm over gradients on different meshes, checked against the full tensors."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mindspeed_llm.optim.clip import gradient_norm

dist.init_process_group("gloo")
flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
torch.manual_seed(0)  # the same full gradients on every rank
layouts = [
    (None, None, (5,)),
    (flat, [Shard(0)], (7, 3)),  # uneven shards
    (flat, [Shard(0)], (2, 3)),  # empty shards on two ranks
    (grid, [Replicate(), Shard(0)], (6, 5)),
    (experts, [Shard(1), Shard(0)], (4, 6, 2)),
    (experts["ep"], [Shard(0)], (4, 3)),  # the efsdp ranks hold copies outside the mesh
    (flat, [Replicate()], (3, 3)),
]
full, parameters = [], []
for mesh, placements, shape in layouts:
    gradient = torch.randn(shape) * 3
    full.append(gradient)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    if mesh is not None:
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
        gradient = distribute_tensor(gradient, mesh, placements)
    parameter.grad = gradient.clone()
    parameters.append(parameter)
parameters.append(torch.nn.Parameter(torch.zeros(2)))  # never used: no gradient

expected = torch.cat([g.double().flatten() for g in full]).norm().item()
norm = gradient_norm(iter(parameters))
assert abs(norm / expected - 1) < 1e-6, (norm, expected)
norms = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
dist.all_gather(norms, torch.tensor(norm, dtype=torch.float64))
assert all(other == norm for other in norms), norms
dist.destroy_process_group()
