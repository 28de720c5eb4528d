"""Run by test_architectures.py on two ranks: every architecture by each kind of context parallelism.

architectures_worker.py OUTPUT.json
"""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from mindspeed_llm.batch import to_device
from mindspeed_llm.data.collate import Batch
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.loss import cross_entropy_sum
from mindspeed_llm.parallel.context.apply import apply_context_parallel
from mindspeed_llm.parallel.context.sharder import ContextSharder
from tests.llm.parallel.context.architectures import EQUAL, LENGTHS, REFUSED, build

CPU = torch.device("cpu")


def documents() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        ids = torch.randint(3, 65, (1, length), generator=generator)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        made.append(Batch(input_ids=ids, labels=labels, position_ids=torch.arange(length)[None]))
    return made


def gradients(model: PreTrainedModel, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """And the loss."""
    losses = [cross_entropy_sum(model, to_device(batch, CPU))[0] for batch in batches]
    loss = torch.stack(losses).sum() / sum(LENGTHS)
    loss.backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | found


def outcome(model: PreTrainedModel, expected: dict[str, torch.Tensor], ring: int, ulysses: int) -> str:
    """ "equal", why the model is refused, or what is wrong."""
    mesh = init_device_mesh("cpu", (1, ring, ulysses), mesh_dim_names=("batch", "ring", "ulysses"))
    packed = Batch({name: torch.cat([d[name] for d in documents()], dim=1) for name in documents()[0]})
    try:
        apply_context_parallel(model, mesh)
        actual = gradients(model, [ContextSharder.of(mesh).shard_batch(packed)])
    except ConfigError as error:
        return f"refused: {error}"
    if not expected:
        return "not refused"
    flat = torch.cat([x.flatten() for x in actual.values()])
    dist.all_reduce(flat)
    parts = flat.split([x.numel() for x in expected.values()])
    total = torch.cat([x.flatten() for x in expected.values()]).norm()
    for (name, value), part in zip(expected.items(), parts, strict=True):
        error = (part - value.flatten()).norm()
        limit = 1e-6 * value if name == "loss" else 1e-5 * value.norm() + 1e-7 * total
        if not error <= limit:
            return f"wrong: {name} is off by {error:.1e}, {limit:.1e} allowed"
    return "equal"


if __name__ == "__main__":
    outcomes: dict[str, list[str]] = {}
    with start() as distributed:
        for name in [*EQUAL, *REFUSED]:
            model = build(name)
            expected = gradients(copy.deepcopy(model), documents()) if name in EQUAL else {}
            outcomes[name] = [outcome(copy.deepcopy(model), expected, *sizes) for sizes in ((2, 1), (1, 2))]
        if distributed.is_main:
            with open(sys.argv[1], "w") as file:
                json.dump(outcomes, file)
