"""What the parallel plans need to know of a model, found by its structure and never by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks in order: the elements of the ``ModuleList`` that holds the most parameters.

    Lists inside another list's elements (experts of a layer) lose to the list around them.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return list(max(lists, key=_num_parameters)) if lists else []


def _num_parameters(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def has_tied_embeddings(model: PreTrainedModel) -> bool:
    """Is the output projection the input embedding itself?"""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a layer's experts as stacked weights: those of transformers' experts interface."""
    return [module for module in model.modules() if _has_experts_interface(module) and _is_stacked(module)]


def num_experts(experts: nn.Module) -> int:
    """Experts in a module of ``expert_modules``, over all ranks."""
    return cast(int, experts.num_experts)


def expert_block(model: nn.Module, experts: nn.Module) -> nn.Module:
    """The module that ``experts`` are a child of; its other children route to them or are shared experts."""
    return next(module for module in model.modules() if experts in module.children())


def float32_routers(model: PreTrainedModel) -> list[nn.Module]:
    """Modules next to a layer's experts that have parameters, all of which the architecture keeps in float32."""
    patterns = model._keep_in_fp32_modules_strict or ()
    strict = re.compile("|".join(rf"(^|\.){pattern}($|\.)" for pattern in patterns) or "$^")
    names = {module: name for name, module in model.named_modules()}
    return [
        module
        for experts in expert_modules(model)
        for module in expert_block(model, experts).children()
        if (parameters := [f"{names[module]}.{name}" for name, _ in module.named_parameters()])
        and all(map(strict.search, parameters))
    ]


def _has_experts_interface(module: nn.Module) -> bool:
    """Attributes that ``use_experts_implementation`` gives to a module for the implementations to read."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed"))


def _is_stacked(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and all(len(parameter) == num_experts(module) for parameter in parameters)
