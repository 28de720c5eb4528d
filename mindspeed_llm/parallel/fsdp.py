"""Fully sharded data parallelism (FSDP2): which modules form a unit, and how their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.parallel.mesh import Meshes
from mindspeed_llm.parallel.patterns import match_modules
from mindspeed_llm.parallel.structure import decoder_layers, float32_routers, has_tied_embeddings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def apply_fsdp(
    model: PreTrainedModel, meshes: Meshes, parallel: ParallelConfig, experts: Sequence[nn.Module] = ()
) -> None:
    """Shard ``model`` in place: a unit for every decoder layer, for untied embeddings and head, and for the rest.

    Tied embeddings stay in the root unit, where both ends of the model find the one parameter gathered. ``experts``,
    which ``apply_expert_parallel`` has spread over ranks, are units of their own on the expert mesh.
    Parameters keep float32 masters; compute runs in ``param_dtype`` and reductions in ``reduce_dtype``. Routers that
    the architecture keeps in float32, as rounding would choose other experts, are units that compute in it.
    """
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[parallel.param_dtype], reduce_dtype=DTYPES[parallel.reduce_dtype])
    shard = partial(fully_shard, mesh=meshes.dense, ignored_params=_ignored_parameters(model, parallel, experts))
    for module in experts:
        _shard_experts(module, meshes, policy, parallel.reshard_after_forward)
    routers = float32_routers(model)
    for module in routers:
        shard(
            module, mp_policy=replace(policy, param_dtype=None, cast_forward_inputs=False), reshard_after_forward=False
        )
    inner = [*routers, *experts]
    units = [unit for unit in _units(model, parallel) if unit not in inner]
    for unit in reversed(units):  # those inside another one before it
        shard(unit, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward)
    shard(model, mp_policy=policy, reshard_after_forward=False)
    _sum_gradients(model)
    groups = [[unit, *(module for module in inner if module in set(unit.modules()))] for unit in units]
    _prefetch(groups, parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch)


def _shard_experts(experts: nn.Module, meshes: Meshes, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Cut this rank's experts over the ranks that hold the same ones, in a dimension other than that of the experts:
    every part is a rectangle of the whole parameter, which is what checkpoints are read and written by."""
    assert meshes.expert is not None
    mesh = meshes.expert["dp_replicate", "efsdp"]

    def placement(parameter: nn.Parameter) -> Shard:
        size = mesh["efsdp"].size()
        for dim in range(1, parameter.ndim):
            if parameter.shape[dim] % size == 0:
                return Shard(dim)
        raise ConfigError(
            f"parallel.ep_fsdp_size: {size} ranks cannot evenly share experts' weights of the shape "
            f"{list(parameter.shape)}; choose a larger ep_size"
        )

    # Routing weights come in the dtype of the router's choice, often float32: the unit must not cast its inputs.
    policy = replace(policy, cast_forward_inputs=False)
    fully_shard(experts, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, reshard_after_forward=reshard)


def _units(model: PreTrainedModel, parallel: ParallelConfig) -> list[nn.Module]:
    if parallel.fsdp_modules is not None:
        tied = {model.get_input_embeddings(), model.get_output_embeddings()} if has_tied_embeddings(model) else set()
        return [unit for _, unit in match_modules(model, parallel.fsdp_modules, "fsdp_modules") if unit not in tied]
    layers = decoder_layers(model)
    if has_tied_embeddings(model):
        return layers
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [ends[0], *layers, *(end for end in ends[1:] if end is not None)]


def _ignored_parameters(
    model: PreTrainedModel, parallel: ParallelConfig, experts: Sequence[nn.Module]
) -> set[nn.Parameter] | None:
    if not parallel.ignored_modules:
        return None
    modules = match_modules(model, parallel.ignored_modules, "ignored_modules")
    for name, module in modules:
        if any(part in experts for part in module.modules()):
            raise ConfigError(
                f"parallel.ignored_modules: {name} has experts, which parallel.ep_size spreads over ranks"
            )
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"parallel.ignored_modules: {name} is trained, but nothing sums the gradients of what is not sharded; "
                "leave it out here, or let its model freeze it (requires_grad = False)"
            )
    return {parameter for _, module in modules for parameter in module.parameters()}


def _sum_gradients(model: nn.Module) -> None:
    """The loss already carries the only divisor, the global number of targets: gradients are summed, never averaged.

    A factor of 1 alone becomes a premultiplied sum, which gloo and HCCL do not have; hence the plain sum is forced.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(groups: list[list[nn.Module]], forward: int, backward: int) -> None:
    """Gather the next units while one computes. A group is a unit and those inside it.

    Those inside are gathered together with the unit around them, in forward and in backward: recomputation, which runs
    the unit's forward in its backward, then finds them as they were.
    """
    for index, (unit, *inside) in enumerate(groups):
        before, after = (
            [cast(FSDPModule, group[0]) for group in part] for part in (groups[:index], groups[index + 1 :])
        )
        within = [cast(FSDPModule, module) for module in inside]
        cast(FSDPModule, unit).set_modules_to_forward_prefetch([*within, *after[:forward]])
        cast(FSDPModule, unit).set_modules_to_backward_prefetch([*within, *before[::-1][:backward]])
