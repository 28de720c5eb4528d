"""Expert parallelism: every rank of a group holds and computes its part of each layer's experts.

Works on unmodified models of transformers: their experts are modules of a common interface
(``transformers.integrations.use_experts_implementation``) with the weights of all experts stacked in dimension 0,
called with hidden states, the router's choice and its weights. Such a module keeps its class and its weights' names;
its weights become DTensors cut by expert, and its forward sends the tokens to them (``dispatch``). There they are
computed by whichever experts implementation the model is set to, which sees nothing but a smaller number of experts:
biases, clamps and transposed layouts are its own business.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from mindspeed_kernels.hf.experts import FusedExperts
from mindspeed_kernels.hf.replace import fusion_of
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.skeleton import original_class
from mindspeed_llm.parallel.dispatch import Arrivals, Returns, Route, combine, dispatch, plan_route, sum_rows
from mindspeed_llm.parallel.structure import expert_modules, num_experts

_PARTS = {"eager": 1, "fused": 2, "mc2": 2}
"""In how many parts the tokens of a layer travel with each ``parallel.ep_dispatcher``."""


def apply_expert_parallel(model: PreTrainedModel, mesh: DeviceMesh, dispatcher: str = "eager") -> list[nn.Module]:
    """Cut the experts of ``model`` over the dimension ``ep`` of the expert mesh, in place; returns their modules.

    ``dispatcher`` is ``parallel.ep_dispatcher``.

    Raises ConfigError when the model has no stacked experts, or a number of them that the ranks cannot share evenly.
    """
    modules = expert_modules(model)
    if not modules:
        raise ConfigError(
            f"parallel.ep_size: {original_class(model).__name__} has no experts that can be spread over ranks (modules "
            "of transformers' experts interface, with stacked weights); set it to 1"
        )
    ep = mesh["ep"]
    for experts in modules:
        number = num_experts(experts)
        if number % ep.size():
            raise ConfigError(
                f"parallel.ep_size: {ep.size()} ranks cannot evenly share the {number} experts in a layer of "
                f"{original_class(model).__name__}; choose a divisor of {number}"
            )
        for name, parameter in experts.named_parameters(recurse=False):
            part = distribute_tensor(parameter.detach(), ep, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.forward = partial(_forward, experts, ep.get_group(), _PARTS[dispatcher])
    return modules


@torch.compiler.disable  # the numbers of rows are known only once it runs
def _forward(
    experts: nn.Module,
    group: dist.ProcessGroup,
    parts: int,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts' forward on this rank's tokens, in so many parts: [tokens, hidden] -> [tokens, hidden]. Collective.

    With two parts, A and B, an exchange has a computation to hide behind, and in backward likewise::

        exchange    A there  B there  A back   B back
        compute              A        B
    """
    local = _local_view(experts, group.size())
    routes = [plan_route(index, num_experts(experts), group) for index in top_k_index.tensor_split(parts)]
    inputs = zip(hidden_states.tensor_split(parts), top_k_weights.tensor_split(parts), routes, strict=True)
    arriving = [dispatch(*part) for part in inputs]
    returning = [_compute_part(local, part, hidden_states.dtype) for part in arriving]
    return torch.cat([part.wait() for part in returning])


def _compute_part(experts: nn.Module, arrivals: Arrivals, dtype: torch.dtype) -> Returns:
    results = weighted_sums(experts, *arrivals.wait(), arrivals.route)
    return combine(results.to(dtype), arrivals.route)


def weighted_sums(experts: nn.Module, rows: torch.Tensor, weights: torch.Tensor, route: Route) -> torch.Tensor:
    """What the experts of this rank (the only ones in ``experts``) add to each row: [received rows, hidden].

    Fused experts leave out choices that are elsewhere. To any other forward every (row, expert) pair is a token with
    one choice of weight 1, so that there is nothing to leave out.
    """
    fusion = fusion_of(experts)
    if isinstance(fusion, FusedExperts) and fusion.has_kernel(experts, rows):
        return fusion(experts, rows, route.index, weights)
    expert, choice = torch.sort(route.index.flatten(), stable=True)
    expert, choice = expert[: route.num_pairs], choice[: route.num_pairs]
    row = choice // weights.shape[-1]
    results = _compute(experts, rows[row], expert) * weights.flatten()[choice].unsqueeze(-1)
    return sum_rows(results, row, len(rows))


def _compute(experts: nn.Module, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Row i through ``expert[i]``: [pairs, hidden] -> [pairs, hidden]."""
    if not len(rows):
        # Computes a row of zeros and drops it. Without anything to compute this rank would have no graph, and its
        # backward would leave out exchanges that the other ranks wait in.
        return _compute(experts, rows.sum(0, keepdim=True), expert.new_zeros(1))[:0]
    return type(experts).forward(experts, rows, expert.unsqueeze(-1), torch.ones_like(rows[:, :1]))


def _local_view(experts: nn.Module, ranks: int) -> nn.Module:
    """``experts`` as a module that has no others than this rank's: the same attributes, the weights' local parts."""
    view = object.__new__(type(experts))
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in experts._parameters.items()}
    view.__dict__.update(experts.__dict__, _parameters=local, num_experts=num_experts(experts) // ranks)
    return view
