"""The loss in place of the logits, computed where the head's weight is: inside the head's own forward.

A language model's logits are the largest tensor of a step, and the loss needs them a few tokens at a time only. The
model stays as it is; asked for a loss, its head returns the loss, and the model hands on what its head returns. That
works where the model does nothing to the logits, which is proved before, and checked in every forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from mindspeed_kernels import linear_cross_entropy
from mindspeed_kernels.hf.prove import shallow_copy
from mindspeed_kernels.hf.replace import fuse, fusion_of
from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.logging import logger


@dataclass
class LossRequest:
    """What the next forward of a head is to compute."""

    labels: torch.Tensor
    """The target of each position ``[batch, seq]``, -100 where there is none."""
    loss: torch.Tensor | None = None
    """The float32 sum of the targets' cross-entropies, once computed."""


@dataclass(frozen=True)
class LossHead:
    """A fusion (see ``mindspeed_kernels.hf.replace``) for a head, which then returns a loss when one is requested."""

    chunk: int | None
    """Tokens whose logits are held at a time; None for the operator's own choice."""

    def build(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
            request: LossRequest | None = vars(head).get("loss_request")
            if request is None:
                return original(head, hidden)
            if request.loss is not None:
                raise RuntimeError("the head was called twice in a forward pass that asked for one loss")
            request.loss = linear_cross_entropy(
                hidden, head.weight, request.labels, head.bias, ignore_index=IGNORE_INDEX, chunk=self.chunk
            )
            return request.loss

        return forward

    def __str__(self) -> str:
        return "linear_cross_entropy"


def fuse_loss(model: PreTrainedModel, chunk: int | None) -> bool:
    """Let the head compute the loss if the model provably returns what its head does; says why if not.

    Call it on the unsharded model, whose weights may be on the meta device.
    """
    reason = why_not(model)
    if reason is None:
        fuse(cast(nn.Module, model.get_output_embeddings()), LossHead(chunk))
    else:
        logger.info("the logits of all tokens are held for the loss: %s", reason)
    return reason is None


@contextmanager
def loss_requested(model: PreTrainedModel, labels: torch.Tensor) -> Iterator[LossRequest | None]:
    """Within this context the model's ``logits`` are the request's loss; None for a model whose head is not fused."""
    head = model.get_output_embeddings()
    if head is None or not isinstance(fusion_of(head), LossHead):
        yield None
        return
    request = LossRequest(labels)
    head.loss_request = request
    try:
        yield request
    finally:
        del head.loss_request


def why_not(model: PreTrainedModel) -> str | None:
    """Why the head's output cannot be exchanged for a loss; None if it can.

    What the model does around its head runs on a stand-in for its layers, with a head that marks what it returns: the
    model must call it once, on all positions, and return that very tensor as its logits.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or "forward" in vars(head):
        return f"its head is {type(head).__name__}, not a plain linear layer"
    if base is model:
        return "its layers and its head are not apart"
    probe = _Probe()
    stand_in = _StandIn(head.in_features)
    copy = _with_modules(model, {base: stand_in, head: probe})
    tokens = torch.zeros(1, _StandIn.positions, dtype=torch.int64)
    try:
        with torch.no_grad():
            logits = copy(input_ids=tokens, position_ids=tokens, use_cache=False).logits
    except Exception as error:  # whatever a modelling file may raise on a stand-in
        return f"its forward cannot be followed: {type(error).__name__}: {error}".partition("\n")[0]
    if probe.shapes != [(1, _StandIn.positions, head.in_features)]:
        return f"it calls its head on {probe.shapes} and not once on all positions"
    return None if logits is probe.output else "it changes the logits after its head (scales, caps or cuts them)"


class _Output(BaseModelOutput):
    """Nothing but the hidden states, and None for whatever else a model looks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandIn(nn.Module):
    """Returns what a model's layers return."""

    positions = 3

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(torch.ones(1, self.positions, self.hidden_size))


class _Probe(nn.Module):
    """A head that remembers its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(hidden.shape))
        self.output = hidden.new_zeros(*hidden.shape[:-1], 7)
        return self.output


def _with_modules(module: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module tree that shares everything but the modules that are replaced, and those around them."""
    if module in replacements:
        return replacements[module]
    copy = shallow_copy(module)
    for name, child in module._modules.items():
        if child is not None:
            copy._modules[name] = _with_modules(child, replacements)
    return copy
