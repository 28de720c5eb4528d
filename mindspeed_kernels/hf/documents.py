"""Layers around fused linear attention that know the position ids, and keep them to themselves.

Where position ids start again, a document of a packed row starts. transformers makes attention masks of that, but tells
linear attention nothing: its convolution and its state go on from one document into the next. The fused operators take
the ends of documents as `cu_seq_lens_q`, which mixers get from the layer's keyword arguments: so the layer adds it.

Rows with an `attention_mask` are not packed, by transformers' rule. But to these layers transformers passes none if it
is all ones, so the model around them is made to pass the ones.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from mindspeed_kernels.hf import linear_attention, prove
from mindspeed_kernels.hf.attention_mask import ends_of_documents
from mindspeed_kernels.hf.linear_attention import FusedLinearAttention
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.replace import fusion_of
from mindspeed_kernels.hf.rotary import with_globals

name = "documents"

_CACHES = ("cache", "past_key_values", "cache_params")
"""What layers call the cache, now and formerly."""


@dataclass(frozen=True)
class DocumentsOfPositions:
    """A layer's own forward, called with `cu_seq_lens_q` as well when its rows are packed.

    By transformers' rule they are not when there is an `attention_mask` or a cache.
    """

    mixer: str

    def build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(module, *args, **kwargs).arguments | kwargs
            hidden_states, position_ids = given["hidden_states"], given.get("position_ids")
            if (
                isinstance(fusion_of(getattr(module, self.mixer)), FusedLinearAttention)
                and kwargs.get("cu_seq_lens_q") is None
                and given.get("attention_mask") is None
                and all(given.get(cache) is None for cache in _CACHES)
                and position_ids is not None
                and position_ids.dim() == 2
            ):
                kwargs["cu_seq_lens_q"] = ends_of_documents(position_ids, hidden_states.shape[0])
            return original(module, *args, **kwargs)

        return forward

    def __str__(self) -> str:
        return f"position_ids → cu_seq_lens_q of {self.mixer}"


@dataclass(frozen=True)
class GivenMask:
    """A model's own forward, in which a function that makes the masks of linear attention leaves none out."""

    function: str

    def build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        make_mask = inspect.unwrap(original).__globals__[self.function]

        @functools.wraps(make_mask)
        def make(config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
            mask = make_mask(config, inputs_embeds, attention_mask, *args, **kwargs)
            batch, seq = inputs_embeds.shape[:2]
            if mask is None and attention_mask is not None and seq > 1:
                return inputs_embeds.new_ones(batch, seq, dtype=torch.bool)
            return mask

        return with_globals(original, {self.function: make})

    def __str__(self) -> str:
        return f"{self.function} passes masks of ones"


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if this is neither a layer around linear attention
    nor the model that makes the masks of such layers."""
    if _maker_of_masks(module) and any(_layer_site(m) for m in module.modules()):
        return type(module).forward
    return _layer_site(module)


def proof(module: nn.Module, device: torch.device) -> Proof:
    maker = _maker_of_masks(module)
    if maker is None:
        return _layer_proof(module, device)
    try:
        GivenMask(maker).build(type(module).forward)
    except (TypeError, ValueError) as error:
        return Proof.not_applicable(str(error))
    return Proof(GivenMask(maker))


def _maker_of_masks(module: nn.Module) -> str | None:
    """The global name by which a forward calls transformers' function for the masks of linear attention."""
    inner = inspect.unwrap(type(module).forward)
    names = inner.__code__.co_names if isinstance(inner, FunctionType) else ()
    function = getattr(masking_utils, "create_recurrent_attention_mask", None)
    return next((n for n in names if function is not None and inner.__globals__.get(n) is function), None)


def _layer_site(module: nn.Module) -> Hashable | None:
    mixers = _mixers(module)
    parameters = inspect.signature(type(module).forward).parameters
    takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if len(mixers) != 1 or not takes_any or not {"hidden_states", "position_ids"} <= parameters.keys():
        return None
    return type(module).forward, mixers[0], type(getattr(module, mixers[0])).forward


def _layer_proof(module: nn.Module, device: torch.device) -> Proof:
    """Two documents in a row: does the mixer hear of them?"""
    fusion = DocumentsOfPositions(*_mixers(module))
    twin = prove.shallow_copy(module)
    twin._modules = {child: _Same() for child in module._modules} | {fusion.mixer: _Recorder()}
    required = [
        p.name
        for p in list(inspect.signature(type(module).forward).parameters.values())[1:]
        if p.default is p.empty and p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    arguments: dict[str, Any] = dict.fromkeys(required)
    arguments["hidden_states"] = torch.zeros(1, 5, 4, device=device)
    arguments["position_ids"] = torch.tensor([[0, 1, 2, 0, 1]], device=device)
    try:
        fusion.build(type(module).forward)(twin, **arguments)
    except _Heard as heard:
        (ends,) = heard.args
        if isinstance(ends, Tensor) and ends.tolist() == [0, 3, 5]:
            return Proof(fusion)
    except Exception as error:
        return Proof.not_applicable(f"cannot be observed: {type(error).__name__}: {error}".partition("\n")[0])
    return Proof(None, reason=f"{fusion.mixer} does not get the layer's keyword arguments", mismatch=True)


def _mixers(module: nn.Module) -> list[str]:
    return [child for child, m in module.named_children() if linear_attention.site(m) is not None]


class _Same(nn.Module):
    """In the place of what else a layer has."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _Heard(Exception):
    """Carries the ends of documents that a mixer was called with."""


class _Recorder(nn.Module):
    """In the place of the mixer."""

    _mindspeed_fusion = FusedLinearAttention((), ())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise _Heard(kwargs.get("cu_seq_lens_q"))
