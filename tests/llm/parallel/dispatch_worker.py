"""Run by test_dispatch.py under torchrun: a toy mixture over every rank's tokens and experts.

dispatch_worker.py OUTPUT.pt
"""

import os
import sys

import torch
import torch.distributed as dist

from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.parallel.dispatch import combine, dispatch, plan_route, sum_rows
from tests.llm.parallel.toy_mixture import CASES, NUM_EXPERTS, experts_forward, make_weights, rank_inputs


def run_case(case: str, distributed: Distributed, group: dist.ProcessGroup) -> list:
    hidden, index, weights = rank_inputs(case, distributed.rank, distributed.world_size)
    local = NUM_EXPERTS // distributed.world_size
    first = distributed.rank * local
    stacked = make_weights()[first : first + local].clone().requires_grad_()
    for tensor in (hidden, weights):
        tensor.requires_grad_()
    route = plan_route(index, NUM_EXPERTS, group)
    rows, row_weights = dispatch(hidden, weights, route).wait()
    here = (route.index < local).nonzero()  # [pairs, (row, choice)]
    assert len(here) == route.num_pairs
    results = experts_forward(rows[here[:, 0]], route.index[*here.T], stacked) * row_weights[*here.T].unsqueeze(-1)
    output = combine(sum_rows(results, here[:, 0], len(rows)), route).wait()
    (output.sin() * torch.arange(output.shape[-1])).sum().backward()
    mine = {
        "output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, "experts": stacked.grad,
        "sent": len(route.token) - route.there.send_sizes[distributed.rank],
    }  # fmt: skip
    everyone = [None] * distributed.world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def run_cases() -> dict[str, list]:
    with start() as distributed:
        return {case: run_case(case, distributed, dist.group.WORLD) for case in CASES}


if __name__ == "__main__":
    results = run_cases()
    if os.environ["RANK"] == "0":
        torch.save(results, sys.argv[1])
