"""The loss of causal language modelling, as a sum: the caller holds the one divisor, the global number of targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
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
    ``batch["token_mask"]`` [batch, seq], if there, is 0 for padding that the model is not told of by an attention mask:
    it has no part in the balancing loss, nor in ``ExpertLoad``.
    Returns the float32 sum of the targets' cross-entropies, a scalar that is 0 (with a graph) when there are none, and
    with ``with_aux_loss`` a mixture-of-experts model's load-balancing loss.

    Raises ConfigError when that is asked of a model which has none.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    # transformers computes the balancing loss only when asked for router logits. Asked by argument and not by the
    # model's configuration, which is exported.
    options = {"output_router_logits": True} if with_aux_loss else {}
    with loss_requested(model, batch["labels"]) as request, _padding_marked(model, batch.get("token_mask")):
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


@contextmanager
def _padding_marked(model: PreTrainedModel, token_mask: torch.Tensor | None) -> Iterator[None]:
    """Within this context the model may be given a ``token_mask`` and its router logits are those of tokens alone.

    Only an attention mask would tell the model of padding, but then it would not tell packed documents apart.
    """
    if token_mask is None:
        yield
        return
    # No logits would have no loss; that of padding counts by its share of the step's tokens, which is 0.
    tokens = (token_mask if token_mask.any() else torch.ones_like(token_mask)).flatten().nonzero().flatten()

    def without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name != "token_mask"}

    def of_tokens(decoder: nn.Module, args: Any, output: Any) -> None:
        if getattr(output, "router_logits", None) is not None:
            output.router_logits = tuple(layer.flatten(0, -2)[tokens] for layer in output.router_logits)

    # Behind the hooks of others who look at the mask.
    handles = [
        model.register_forward_pre_hook(without_mask, with_kwargs=True),
        model.base_model.register_forward_hook(of_tokens),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
