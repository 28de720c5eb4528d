"""Run by test_attention.py under torchrun: attends across the ranks and writes what rank 0's group found.

attention_worker.py CASES.json OUTPUT.pt
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.parallel.context.attention import ContextAttention
from mindspeed_llm.parallel.context.ring import Scores
from mindspeed_llm.parallel.context.sharder import ContextSharder
from tests.llm.parallel.bytes_sent import BytesSent
from tests.llm.parallel.context.attention_cases import inputs, packed_batch


def run_case(case: dict, world_size: int) -> dict[str, torch.Tensor]:
    """The output and the gradients of the whole sequences, put together from all ranks; what each rank sent."""
    sizes = (world_size // (case["ring"] * case["ulysses"]), case["ring"], case["ulysses"])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("batch", "ring", "ulysses"))
    attend, sharder = ContextAttention(mesh), ContextSharder.of(mesh)
    attend.layout = sharder.shard_batch(packed_batch(case)).layout
    seq, length = attend.layout.seq, sum(case["rows"][0])
    held = sharder.local_token_global_indices(seq)

    tensors = inputs(case)
    whole = {name: _pad(x, seq - length).requires_grad_() for name, x in tensors.items() if name != "sinks"}
    sinks = tensors.get("sinks")
    grad = whole.pop("grad").detach()
    q, k, v = (x[:, held] for x in whole.values())
    sinks = sinks if sinks is None else sinks.requires_grad_()
    with BytesSent() as sent:
        out = attend(q, k, v, sinks, Scores(None, case["window"], case["softcap"]))
        out.backward(grad[:, held])

    found = {name: x.grad for name, x in whole.items()}
    found["out"] = torch.zeros_like(grad).index_copy(1, held, out.detach())
    for tensor in [*found.values(), *([] if sinks is None else [sinks.grad])]:
        dist.all_reduce(tensor, group=mesh.get_group("ring"))
        dist.all_reduce(tensor, group=mesh.get_group("ulysses"))
    found = {name: x[:, :length] for name, x in found.items()}
    found["bytes sent"] = torch.tensor(sent.total)
    return found if sinks is None else found | {"sinks": sinks.grad}


def _pad(x: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    with start() as distributed:
        results = [run_case(case, distributed.world_size) for case in cases]
        if distributed.is_main:
            torch.save(results, sys.argv[2])
