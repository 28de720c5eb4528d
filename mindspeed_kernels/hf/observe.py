"""What a model passes to its layers, and an attention module to its attention function: seen, not guessed."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.rotary import with_globals

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The global name by which modules know transformers' table of attention functions."""
WINDOW = 5
"""To which windows and chunks are narrowed, so that a short sequence is beyond them."""


def uses_interface(module: nn.Module) -> bool:
    """Whether its forward, or one that it may inherit or extend, names the table of attention functions."""
    forwards = (inspect.unwrap(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls))
    return any(INTERFACE in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


def attention_layers(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The elements of module lists that hold attention modules, the outermost of each.

    All elements, also those without attention of their own, as hybrid models have: none of a list computes when others
    stand in for its elements.
    """
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    layers: dict[str, nn.Module] = {}
    for path in modules:
        ancestors = itertools.accumulate(path.split("."), "{}.{}".format)
        layer = next((p for p in ancestors if p.rpartition(".")[0] in lists), None)
        if layer is not None:
            parent = layer.rpartition(".")[0]
            layers |= {f"{parent}.{name}": child for name, child in model.get_submodule(parent).named_children()}
    return layers


class _Observed(Exception):
    """All that was to be seen of a forward pass has been seen."""


class _Recorder(nn.Module):
    """In the place of a layer: notes what it is called with."""

    def __init__(self, layer: nn.Module, waiting: list[_Recorder]) -> None:
        super().__init__()
        vars(self)["layer"] = layer  # not as a submodule
        self.waiting = waiting
        self.arguments: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(self.layer.forward).bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            self.arguments |= value if kind == inspect.Parameter.VAR_KEYWORD else {name: value}
        if self in self.waiting:
            self.waiting.remove(self)
        if not self.waiting:
            raise _Observed
        return self.arguments["hidden_states"]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["layer"], name)


def layer_arguments(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    implementation: str,
    embeds: Tensor,
    batch: dict[str, Tensor],
) -> dict[str, dict[str, Any]]:
    """The arguments of every layer, by its path, that a forward pass over these embeddings reaches.

    Nothing of the model changes, and none of its weights is used: neither in the layers, nor behind the last of them. A
    model that has weights before its first layer, other than its embedding, raises an error if they are on meta.
    """
    copies: dict[str, nn.Module] = {"": prove.shallow_copy(model)}

    def copied(path: str) -> nn.Module:
        if path not in copies:
            parent, _, name = path.rpartition(".")
            copies[path] = copied(parent)._modules[name] = prove.shallow_copy(model.get_submodule(path))
        return copies[path]

    waiting: list[_Recorder] = []
    recorders = {path: _Recorder(layer, waiting) for path, layer in layers.items()}
    waiting.extend(recorders.values())
    for path, recorder in recorders.items():
        parent, _, name = path.rpartition(".")
        copied(parent)._modules[name] = recorder
    shared: dict[int, Any] = {}  # one copy of a config that several modules have
    for module in copies.values():
        if hasattr(module, "config"):
            module.config = _with(copy.deepcopy(module.config, shared), implementation)
    with suppress(_Observed):
        copies[""](inputs_embeds=embeds, use_cache=False, **batch)
    return {path: recorder.arguments for path, recorder in recorders.items() if recorder not in waiting}


def _with(config: Any, implementation: str) -> Any:
    """The config with this implementation, and with spans so narrow that a short sequence is beyond them."""
    config._attn_implementation = implementation
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), WINDOW))
    return config


@dataclass(frozen=True)
class AttentionCall:
    """How a module calls its attention function."""

    shapes: tuple[torch.Size, ...]
    """Of q, k and v, `[batch, heads, seq, dim]`."""
    options: dict[str, Any]
    """Tensors among them as the names of parameters of the module, or of arguments of the layer."""
    arguments: dict[str, Any]
    """Of the layer."""

    @property
    def key(self) -> Hashable:
        return self.shapes, repr(sorted(self.options.items(), key=lambda item: item[0]))


@dataclass(frozen=True)
class TensorOf:
    """Stands for a tensor in `AttentionCall.options`."""

    kind: str
    name: str


class _CallSeen(Exception):
    """Carries what an attention function was called with."""


class _Interface:
    """In the place of transformers' table of attention functions."""

    def get_interface(self, implementation: str, default: Callable) -> Callable:
        def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> None:
            raise _CallSeen((q.shape, k.shape, v.shape), options)

        return record


def attention_call(module: nn.Module, arguments: dict[str, Any]) -> AttentionCall:
    """Run the module on the meta device with what its layer was called with, as far as it takes that."""
    twin = copy.deepcopy(module).to("meta")
    forward = with_globals(type(module).forward, {INTERFACE: _Interface()})
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    accepted = {p.name: None for p in parameters if p.default is p.empty and p.kind != inspect.Parameter.VAR_KEYWORD}
    accepted |= {name: value for name, value in arguments.items() if takes_all or name in {p.name for p in parameters}}
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), accepted | {"attention_mask": None})
    try:
        forward(twin, **on_meta)
    except _CallSeen as seen:
        shapes, options = seen.args
        names = {id(p): TensorOf("parameter", name) for name, p in twin.named_parameters(recurse=False)}
        names |= {id(t): TensorOf("argument", name) for name, t in on_meta.items() if isinstance(t, Tensor)}
        return AttentionCall(
            shapes, {k: names[id(t)] if isinstance(t, Tensor) else t for k, t in options.items()}, arguments
        )
    raise RuntimeError("it does not call an attention function")
