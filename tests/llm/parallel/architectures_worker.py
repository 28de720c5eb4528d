"""Run by test_expert.py on two ranks: gradients of architectures with their experts spread, against the whole model.

architectures_worker.py ARCHITECTURE ...
"""

import copy
import sys

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from mindspeed_llm.parallel.structure import expert_modules
from tests.llm.models.architectures import make_model

IDS = torch.randint(3, 65, (2, 16), generator=torch.Generator().manual_seed(3))


def backward(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The part that ``ids`` have in the mean loss over all rows."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / IDS[:, 1:].numel()
    loss.backward()
    return loss.detach()


def check(name: str, distributed: Distributed) -> None:
    whole = make_model(name, num_experts=4).train()
    model = copy.deepcopy(whole)
    expected = backward(whole, IDS)
    parallel = ParallelConfig(param_dtype="fp32", ep_size=2)
    parallelize(model, build_meshes(parallel, 2, distributed.device), parallel)
    experts = expert_modules(model)
    assert all(isinstance(p, DTensor) and len(p.to_local()) == 2 for module in experts for p in module.parameters())
    (loss,) = distributed.sum([backward(model, IDS[distributed.rank :][:1]).item()])
    assert abs(loss / expected.item() - 1) <= 1e-6, f"{name}: loss {loss}, {expected.item()} expected"
    total = torch.cat([p.grad.flatten() for p in whole.parameters() if p.grad is not None]).norm()
    rounding = torch.finfo(torch.float32).eps * total  # some gradients of DeepSeek-V4 would be 0 without it
    for (key, parameter), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None), f"{name}: {key}"
        if wanted.grad is not None:
            error = (parameter.grad.full_tensor() - wanted.grad).norm()
            limit = 1e-5 * wanted.grad.norm() + rounding
            assert error <= limit, f"{name}: gradient of {key} is off by {error:.1e}, {limit:.1e} allowed"


if __name__ == "__main__":
    with start() as distributed:
        for name in sys.argv[1:]:
            check(name, distributed)
