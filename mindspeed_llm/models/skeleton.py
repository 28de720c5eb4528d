"""Models whose parameters hold no data yet, and how they get it.

A model is built with its parameters on the meta device and its buffers real: ``__init__`` computes the buffers
(``inv_freq`` of any rope, decay tables, ...) exactly as on a CPU, and only the parameters wait for their shards.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

Box = tuple[slice, ...]
"""A rectangular part of a tensor: one ``slice(start, stop)`` per dimension."""

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within this context every parameter that a module registers moves to the meta device; buffers stay real.

    The memory that a parameter asks for before it is registered (``torch.empty``) is never touched: it costs nothing.
    """

    moved = WeakIdKeyDictionary()  # a parameter registered in two modules is shared, and stays so

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # keep as it is
        if parameter not in moved:
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return moved[parameter]

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def original_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's own class: ``fully_shard`` replaces it by a subclass such as ``FSDPLlamaForCausalLM``."""
    return next(c for c in type(model).__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, FSDPModule))


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The model as its class builds it: no shards, no wrappers, no replaced forwards, no parameter data.

    transformers decides by class and by module names how to convert and to initialise weights; on a model that is
    sharded or wrapped it would come to other conclusions.
    """
    with parameters_on_meta():
        return original_class(model)(copy.deepcopy(model.config))


def canonical_name(name: str) -> str:
    """A parameter's or module's name without what activation checkpointing and ``torch.compile`` put in between."""
    return _WRAPPERS.sub("", name)


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by canonical name; a shared parameter is listed under each of its names.

    FSDP units that a forward pass left gathered, in the compute dtype, are put back to their shards first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                state[canonical_name(f"{prefix}.{name}" if prefix else name)] = tensor
    return state


def materialize(model: PreTrainedModel, device: torch.device | str | None = None) -> None:
    """Give every meta parameter real memory, uninitialised, of its shard's size; shared parameters stay shared.

    ``device`` defaults to that of the parameters' mesh, the CPU for a model without DTensors. Buffers move there too;
    those on the meta device (a model that wasn't built by ``ModelFactory``) get the values that ``__init__`` computes.
    """
    device = torch.device(device or _mesh_device(model))
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _empty_like(parameter, device)
                module._parameters[name] = made[id(parameter)]
    _place_buffers(model, device)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """This rank's memory of a tensor, and which part of the full tensor it holds."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    placements = tensor.placements
    if any(isinstance(p, Partial) or not (p.is_shard() or p.is_replicate()) for p in placements):
        raise NotImplementedError(f"a shard placed as {placements} is no rectangular part of its tensor")
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    local: torch.Tensor = cast(DTensor, tensor.detach()).to_local()
    return local, tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def _mesh_device(model: nn.Module) -> str:
    return next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), "cpu")


def _empty_like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device=device)
        data: torch.Tensor = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        data = torch.empty_like(parameter, device=device)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _place_buffers(model: PreTrainedModel, device: torch.device) -> None:
    values: dict[str, torch.Tensor] | None = None
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                values = dict(skeleton(model).named_buffers()) if values is None else values
                full_name = canonical_name(f"{prefix}.{name}" if prefix else name)
                if full_name not in values:
                    raise RuntimeError(f"buffer {full_name} has no value: {original_class(model)} doesn't build it")
                buffer = values[full_name]
            module._buffers[name] = None if buffer is None else buffer.to(device)
