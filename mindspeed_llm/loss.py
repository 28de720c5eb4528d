"""The loss of causal language modelling, as a sum: the caller holds the one divisor, the global number of targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from mindspeed_llm.batch import IGNORE_INDEX


def cross_entropy_sum(
    model: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward pass of one micro-batch.

    ``batch["labels"]`` [batch, seq] is the target of each position, already shifted, -100 where there is none.
    Returns the float32 sum of the targets' cross-entropies, a scalar that is 0 (with a graph) when there are none, and
    a mixture-of-experts model's load-balancing loss, if the model was asked for it.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    # Without a cache transformers derives the mask of packed documents from position ids that restart at 0.
    output = model(**inputs, use_cache=False)
    logits = output.logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, getattr(output, "aux_loss", None)
