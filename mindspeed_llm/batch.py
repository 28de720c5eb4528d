"""What a micro-batch holds, counted on the host before its forward pass. ``data.collate`` describes its layout."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_llm.data.collate import Batch
from mindspeed_llm.data.encode import IGNORE_INDEX


def num_targets(batch: Batch) -> int:
    """Positions that count in the loss."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def num_attended_pairs(batch: Batch) -> int:
    """(query, key) pairs of causal attention within documents: a token at position p attends to p + 1 keys."""
    keys = batch["position_ids"] + 1
    mask = batch.get("attention_mask")
    return int(keys.sum() if mask is None else (keys * mask).sum())


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The tensors of a batch on the device that computes, and what context parallelism has to know beside them."""
    tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return tensors if batch.layout is None else tensors | {"context_layout": batch.layout}
