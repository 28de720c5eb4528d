"""Position ids on their way into a model that sees a part of each row: do they arrive, and what of the other parts?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mindspeed_llm.parallel.context.attention import ContextAttention
from mindspeed_llm.parallel.structure import decoder_layers


class PositionsProbe:
    """Looks, during one forward pass, whether position ids reach an embedding, rotary or learned.

    A model may have none and leave the order of tokens to linear attention (Kimi Linear). Then its first layer must get
    the embeddings of the tokens as they are: positions of its own making would be those of a rank's part.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.expected: Tensor | None = None
        self.used = False
        self.unneeded = False
        tokens = model.get_input_embeddings()
        embeddings = [m for m in model.modules() if m is not tokens and (isinstance(m, nn.Embedding) or _is_rotary(m))]
        self._handles = [m.register_forward_pre_hook(self._look, with_kwargs=True) for m in embeddings]
        if not embeddings:
            self._handles.append(tokens.register_forward_hook(self._remember))
            self._handles.append(decoder_layers(model)[0].register_forward_pre_hook(self._compare, with_kwargs=True))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _look(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found = (*args, *kwargs.values())
        self.used |= self.expected is not None and any(_are_positions(x, self.expected) for x in found)

    def _remember(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        self._embedded = output

    def _compare(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        self.unneeded = torch.equal(hidden_states, self._embedded.to(hidden_states.dtype))
        del self._embedded


class LastPosition:
    """Shows rotary embeddings the last position of the whole micro-batch, whatever part of it a rank has.

    Some choose their frequencies by the largest position that they are given (LongRoPE, dynamic NTK): without it ranks
    that have the ends of rows would rotate otherwise than the others. It is given as one more token behind each row,
    whose rotation is taken away again.
    """

    def __init__(self, model: nn.Module, attend: ContextAttention) -> None:
        self._attend = attend
        self._extended: set[nn.Module] = set()
        self.position_ids: Tensor | None = None
        """Those that the model is called with."""
        for module in model.modules():
            if _is_rotary(module):
                module.register_forward_pre_hook(self._extend, with_kwargs=True)
                module.register_forward_hook(self._cut)

    def _extend(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        last = self._attend.present_layout().last_position

        def extended(x: Any) -> Any:
            if self.position_ids is None or not _are_positions(x, self.position_ids):
                return x
            self._extended.add(module)
            return torch.cat([x, x.new_full((*x.shape[:-1], 1), last)], dim=-1)

        return tuple(map(extended, args)), {name: extended(x) for name, x in kwargs.items()}

    def _cut(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if module not in self._extended:
            return output
        self._extended.remove(module)
        return tuple(x[..., :-1, :] for x in output) if isinstance(output, tuple) else output[..., :-1, :]


def _are_positions(x: Any, position_ids: Tensor) -> bool:
    """Are these they, or several equal ones for the axes of images?"""
    return isinstance(x, Tensor) and x.shape[-2:] == position_ids.shape and bool((x == position_ids).all())


def _is_rotary(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
