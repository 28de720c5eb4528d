"""An optimizer's state by parameter name: independent of the order and the groups that parameters have.

A parameter that has never had a gradient has no state. It is saved without, and loaded without: giving it a state of
zeros would start its bias correction at the wrong step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mindspeed_llm.models.skeleton import canonical_name

_PREFIX = "optimizer."
Tensors = dict[str, torch.Tensor]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """``optimizer.<parameter>/<state>`` -> the state's own tensor, such as ``optimizer.lm_head.weight/exp_avg``."""
    return {
        f"{_PREFIX}{name}/{key}": value
        for name, parameter in _named_parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def empty_optimizer_state(model: nn.Module, stored: Mapping[str, STORAGE_TYPES]) -> Tensors:
    """Tensors to read the optimizer state of a checkpoint into: cut like their parameter, or whole (step counters)."""
    parameters = _named_parameters(model)
    tensors = {}
    for key, metadata in stored.items():
        if key.startswith(_PREFIX) and isinstance(metadata, TensorStorageMetadata):
            name = key.removeprefix(_PREFIX).rpartition("/")[0]
            parameter = parameters.get(name)
            if parameter is not None and metadata.size == parameter.shape and parameter.ndim:
                tensors[key] = torch.zeros_like(parameter, dtype=metadata.properties.dtype)
            else:
                tensors[key] = torch.zeros(metadata.size, dtype=metadata.properties.dtype)
    return tensors


def put_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Replace the whole state of ``optimizer`` by ``tensors``."""
    parameters = _named_parameters(model)
    optimizer.state.clear()
    for key, tensor in tensors.items():
        name, _, state = key.removeprefix(_PREFIX).rpartition("/")
        optimizer.state[parameters[name]][state] = tensor.detach() if isinstance(tensor, DTensor) else tensor


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name): parameter for name, parameter in model.named_parameters()}
