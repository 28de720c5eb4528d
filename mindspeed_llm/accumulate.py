"""The gradient of one optimizer step, accumulated over micro-batches and ranks as if it were one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from mindspeed_llm.batch import num_attended_pairs, num_targets, to_device
from mindspeed_llm.data.collate import Batch
from mindspeed_llm.foundation.distributed import Distributed
from mindspeed_llm.loss import cross_entropy_sum
from mindspeed_llm.parallel.context.sharder import WHOLE, ContextSharder


@dataclass(frozen=True)
class StepCounts:
    """What the micro-batches of one optimizer step hold, summed over all ranks."""

    targets: float
    """Positions that count in the loss."""
    divisor: float
    """What the sum of the losses is divided by: ``targets``, unless another system's count is asked for."""
    tokens: float
    """Tokens, padding excluded."""
    attended_pairs: float
    """(query, key) pairs of causal attention within documents."""
    micro_batches: float


def count_step(
    window: list[Batch], distributed: Distributed, parity: str = "none", sharder: ContextSharder = WHOLE
) -> StepCounts:
    """Count the global batch before its first forward pass. Collective.

    ``window`` has the micro-batches before ``sharder`` cuts them: every rank of its group counts the same ones.

    LLaMA-Factory counts labels before the shift, the first of a row too, though no position predicts it.
    """
    targets = sum(num_targets(batch) for batch in window)
    local = [
        targets,
        sum(batch.num_unshifted_labels for batch in window) if parity == "llamafactory" else targets,
        sum(batch.num_tokens for batch in window),
        sum(num_attended_pairs(batch) for batch in window),
        len(window),
    ]
    return StepCounts(*(total / sharder.num_ranks for total in distributed.sum(local)))


def forward_backward(
    model: PreTrainedModel,
    window: list[Batch],
    counts: StepCounts,
    aux_loss_coefficient: float = 0.0,
    parity: str = "none",
    sharder: ContextSharder = WHOLE,
) -> tuple[float, float]:
    """Accumulate the gradients of the step; returns this rank's part of the loss and of the balancing loss.

    ``sharder`` cuts the micro-batches of ``window``. The ranks of its group add up to the loss of the whole rows; each
    has the balancing loss of the whole rows, and counts it by its share.

    The loss is divided by the global number of targets, so summed gradients are those of the global batch's mean.
    A micro-batch's balancing loss counts by its share of the step's tokens, whichever rank it is on; in LLaMA-Factory
    each counts in full, so that it grows with the accumulation. Megatron's gradient is that of the mean of the
    micro-batches' means, whatever their numbers of targets; the loss it reports is the mean over the targets.
    """
    device = next(model.parameters()).device
    total_loss = total_aux = torch.zeros((), device=device)
    for index, batch in enumerate(window):
        # Ranks exchange gradients once a step, after the last micro-batch.
        cast(FSDPModule, model).set_requires_gradient_sync(index == len(window) - 1)
        share = 1.0 if parity == "llamafactory" else batch.num_tokens / max(counts.tokens, 1)
        inputs = to_device(sharder.shard_batch(batch), device)
        loss, aux_loss = cross_entropy_sum(model, inputs, with_aux_loss=aux_loss_coefficient > 0)
        divisor = num_targets(batch) * counts.micro_batches if parity == "megatron" else counts.divisor
        objective = loss / max(divisor, 1)
        if aux_loss is not None:
            aux_loss = aux_loss * share / sharder.num_ranks
            objective = objective + aux_loss_coefficient * aux_loss
            total_aux = total_aux + aux_loss.detach()
        objective.backward()
        total_loss = total_loss + loss.detach() / max(counts.divisor, 1)
    return total_loss.item(), total_aux.item()
