"""The gradient of one optimizer step, accumulated over micro-batches and ranks as if it were one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from mindspeed_llm.batch import num_attended_pairs, num_targets, to_device
from mindspeed_llm.data.collate import Batch
from mindspeed_llm.foundation.distributed import Distributed
from mindspeed_llm.loss import cross_entropy_sum


@dataclass(frozen=True)
class StepCounts:
    """What the micro-batches of one optimizer step hold, summed over all ranks."""

    targets: float
    """Positions with a label: the divisor of the loss."""
    tokens: float
    """Tokens, padding excluded."""
    attended_pairs: float
    """(query, key) pairs of causal attention within documents."""


def count_step(window: list[Batch], distributed: Distributed) -> StepCounts:
    """Count the global batch before its first forward pass. Collective."""
    local = [
        sum(num_targets(batch) for batch in window),
        sum(batch.num_tokens for batch in window),
        sum(num_attended_pairs(batch) for batch in window),
    ]
    return StepCounts(*distributed.sum(local))


def forward_backward(
    model: FSDPModule, window: list[Batch], counts: StepCounts, aux_loss_coefficient: float = 0.0
) -> tuple[float, float]:
    """Accumulate the gradients of the step; returns this rank's part of the loss and of the balancing loss.

    The loss is divided by the global number of targets, so summed gradients are those of the global batch's mean.
    A micro-batch's balancing loss counts by its share of the step's tokens, whichever rank it is on.
    """
    device = next(model.parameters()).device
    total_loss = total_aux = torch.zeros((), device=device)
    for index, batch in enumerate(window):
        # Ranks exchange gradients once a step, after the last micro-batch.
        model.set_requires_gradient_sync(index == len(window) - 1)
        token_share = batch.num_tokens / max(counts.tokens, 1)
        loss, aux_loss = cross_entropy_sum(model, to_device(batch, device))
        objective = loss = loss / max(counts.targets, 1)
        if aux_loss is not None and aux_loss_coefficient:
            aux_loss = aux_loss * token_share
            objective = loss + aux_loss_coefficient * aux_loss
            total_aux = total_aux + aux_loss.detach()
        objective.backward()
        total_loss = total_loss + loss.detach()
    return total_loss.item(), total_aux.item()
