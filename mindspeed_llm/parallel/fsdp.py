"""Fully sharded data parallelism (FSDP2): which modules form a unit, and how their gradients are summed."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.patterns import match_modules
from mindspeed_llm.parallel.structure import decoder_layers, has_tied_embeddings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def apply_fsdp(model: PreTrainedModel, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
    """Shard ``model`` in place: a unit for every decoder layer, for untied embeddings and head, and for the rest.

    Tied embeddings stay in the root unit, where both ends of the model find the one parameter gathered.
    Parameters keep float32 masters; compute runs in ``param_dtype`` and reductions in ``reduce_dtype``.
    """
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[parallel.param_dtype], reduce_dtype=DTYPES[parallel.reduce_dtype])
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=_ignored_parameters(model, parallel))
    units = [shard(unit, reshard_after_forward=parallel.reshard_after_forward) for unit in _units(model, parallel)]
    shard(model, reshard_after_forward=False)
    _sum_gradients(model)
    _prefetch(units, parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch)


def _units(model: PreTrainedModel, parallel: ParallelConfig) -> list[nn.Module]:
    if parallel.fsdp_modules is not None:
        tied = {model.get_input_embeddings(), model.get_output_embeddings()} if has_tied_embeddings(model) else set()
        return [unit for _, unit in match_modules(model, parallel.fsdp_modules, "fsdp_modules") if unit not in tied]
    layers = decoder_layers(model)
    if has_tied_embeddings(model):
        return layers
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [ends[0], *layers, *(end for end in ends[1:] if end is not None)]


def _ignored_parameters(model: PreTrainedModel, parallel: ParallelConfig) -> set[nn.Parameter] | None:
    if not parallel.ignored_modules:
        return None
    modules = match_modules(model, parallel.ignored_modules, "ignored_modules")
    return {parameter for _, module in modules for parameter in module.parameters()}


def _sum_gradients(model: nn.Module) -> None:
    """The loss already carries the only divisor, the global number of targets: gradients are summed, never averaged.

    A factor of 1 alone becomes a premultiplied sum, which gloo and HCCL do not have; hence the plain sum is forced.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(units: list[FSDPModule], forward: int, backward: int) -> None:
    """Gather the next units while one computes: ``units[i + 1 :]`` in forward, ``units[i - 1 ::-1]`` in backward."""
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        unit.set_modules_to_backward_prefetch(units[max(index - backward, 0) : index][::-1])
