"""What a micro-batch holds, counted on the host before its forward pass. ``data.collate`` describes its layout."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_llm.data.collate import Batch
from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.foundation.device import copy_to


def num_targets(batch: Batch) -> int:
    """Positions that count in the loss."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def token_mask(batch: Batch) -> torch.Tensor | None:
    """``[b, s]``, 0 for padding, whether or not the model is told of it; None if there is none."""
    return batch.get("attention_mask", batch.token_mask)


def num_attended_pairs(batch: Batch) -> int:
    """(query, key) pairs of causal attention within documents: a token at position p attends to p + 1 keys."""
    keys = batch["position_ids"] + 1
    mask = token_mask(batch)
    return int(keys.sum() if mask is None else (keys * mask).sum())


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The tensors of a batch on the device that computes, and what is to be known beside them: which tokens of packed
    rows are padding, and where context parallelism's documents lie."""
    tensors: dict[str, Any] = {name: copy_to(tensor, device) for name, tensor in batch.items()}
    if batch.token_mask is not None:
        tensors["token_mask"] = batch.token_mask.to(device, non_blocking=True)
    if batch.layout is not None:
        tensors["context_layout"] = batch.layout
    return tensors
