"""What one micro-batch holds, counted.

A batch is a dict of int64 tensors [batch, seq]: ``input_ids``; ``labels``, the target of each position (already
shifted, -100 for none); ``position_ids``, restarting at 0 with every packed document; and ``attention_mask`` only if
rows are padded and nothing is packed.
"""

from __future__ import annotations

import torch

IGNORE_INDEX = -100
Batch = dict[str, torch.Tensor]


def num_targets(batch: Batch) -> int:
    """Positions that count in the loss."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def num_tokens(batch: Batch) -> int:
    """Tokens without padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def num_attended_pairs(batch: Batch) -> int:
    """(query, key) pairs of causal attention within documents: a token at position p attends to p + 1 keys."""
    keys = batch["position_ids"] + 1
    mask = batch.get("attention_mask")
    return int(keys.sum() if mask is None else (keys * mask).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch that was counted on the host."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
