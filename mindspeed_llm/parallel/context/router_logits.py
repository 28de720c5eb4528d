"""Router logits of the whole micro-batch, from which a mixture-of-experts model computes its balancing loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mindspeed_llm.parallel.context.attention import ContextAttention
from mindspeed_llm.parallel.context.ulysses import gather


def gather_router_logits(attend: ContextAttention) -> Callable[[nn.Module, tuple, Any], None]:
    """A forward hook for a model's decoder that completes its ``router_logits``, when they were asked for.

    The balancing loss multiplies means over the tokens, so that no sum of the ranks' own losses gives it. Every rank of
    the group gets the logits of all of them (``layers x tokens x experts``, only when there is a balancing loss),
    without padding, and so the loss of the whole micro-batch. Gradients add up over the ranks, whose objectives must
    therefore have this loss in shares.
    """

    def hook(decoder: nn.Module, args: tuple, output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        if logits is not None:
            output.router_logits = tuple(_gather(layer.flatten(0, -2), attend) for layer in logits)

    return hook


def _gather(logits: Tensor, attend: ContextAttention) -> Tensor:
    """``[batch * seq / ranks, num_experts]`` of each rank to ``[tokens, num_experts]`` of all."""
    logits = gather(logits, (attend.ulysses, attend.ring)).flatten(0, 1)
    assert attend.layout is not None
    counted = attend.layout.counted
    # No logits would have no loss; that of padding counts by its share of the step's tokens, which is 0.
    tokens = (counted if counted.any() else ~counted).flatten().nonzero().flatten()
    return logits[tokens.to(logits.device)]
