"""What the parallel plans need to know of a model, found by its structure and never by its name."""

from __future__ import annotations

from collections.abc import Iterable

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
