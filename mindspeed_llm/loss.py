"""The loss of causal language modelling, as a sum: the caller holds the one divisor, the global number of targets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.loss_head import loss_requested
from mindspeed_llm.models.skeleton import original_class


def cross_entropy_sum(
    model: PreTrainedModel, batch: dict[str, Any], *, with_aux_loss: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward pass of one micro-batch.

    ``batch["labels"]`` [batch, seq] is the target of each position, already shifted, -100 where there is none.
    Returns the float32 sum of the targets' cross-entropies, a scalar that is 0 (with a graph) when there are none, and
    with ``with_aux_loss`` a mixture-of-experts model's load-balancing loss.

    Raises ConfigError when that is asked of a model which has none.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    # transformers computes the balancing loss only when asked for router logits. Asked by argument and not by the
    # model's configuration, which is exported.
    options = {"output_router_logits": True} if with_aux_loss else {}
    with loss_requested(model, batch["labels"]) as request:
        # Without a cache transformers derives the mask of packed documents from position ids that restart at 0.
        output = model(**inputs, use_cache=False, **options)
    aux_loss = getattr(output, "aux_loss", None)
    if with_aux_loss and aux_loss is None:
        raise ConfigError(f"training.router_aux_loss_coef: {original_class(model).__name__} has no load-balancing loss")
    loss = _of_logits(output.logits, batch["labels"]) if request is None else output.logits
    if request is not None and loss is not request.loss:
        raise RuntimeError(
            f"{original_class(model).__name__} does not return what its head computes; set "
            "optimization.chunk_loss_size: 0"
        )
    return loss, aux_loss if with_aux_loss else None


def _of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
