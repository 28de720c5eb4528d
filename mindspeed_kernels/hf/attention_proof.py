"""Switch a model to `flash_attention`, if its own attention proves to compute the same.

The switch is one for the whole model, because masks are made once for all layers. What a model asks of attention is
observed, not guessed. First, the masks: its forward runs on a few small batches up to its last layer, with a recorder
in the place of every layer, once for each implementation. Second, the call: each kind of attention module runs on the
meta device up to the point where it calls its attention function. On inputs of these shapes, with these arguments and
masks, the model's own attention function and ours then run forward and backward.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.attention import NAME, attend, register_attention
from mindspeed_kernels.hf.attention_mask import AttentionMask
from mindspeed_kernels.hf.prove import Deviation, Proof
from mindspeed_kernels.hf.report import Report, Site
from mindspeed_kernels.hf.rotary import with_globals

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
_SEQ, _WINDOW = 14, 5
"""Of the batches that are compared; a model's window is narrowed so that it shows."""
_MAX_ULPS = {torch.float32: 64, torch.bfloat16: 8}
"""More than for a single operation: the gradient of a softmax is a difference of sums several times its size."""


@dataclass(frozen=True)
class Implementation:
    """What `Proof.fusion` is for a model's attention: not a forward of a module, but a name in the model's config."""

    name: str
    before: str

    def __str__(self) -> str:
        return f"{self.name} instead of {self.before}"


@dataclass(frozen=True)
class AttentionReport(Report):
    """The attention modules of a model; `restore()` gives the model its own implementation back."""

    model: PreTrainedModel
    before: str

    @property
    def switched(self) -> bool:
        return bool(self.sites) and all(site.fused for site in self.sites)

    def restore(self) -> None:
        self.model.set_attn_implementation(self.before)


def use_attention(model: PreTrainedModel, *, device: torch.device | None = None) -> AttentionReport:
    """`model.set_attn_implementation("mindspeed")`, if every attention module proves equal to itself.

    Each kind of attention module runs with the model's present implementation and with ours, in float32 and bfloat16,
    on plain, padded and packed batches. Only if all agree is the model switched; otherwise it stays as it is, and the
    report says why. The model's weights are not read; they may be on the meta device, its buffers may not. Call it
    before `hf.apply`, `fully_shard` and `torch.compile`.

    Args:
        model: any causal language model of transformers.
        device: where to compare; by default where the model's parameters are, the CPU for those on the meta device.

    Returns:
        The report, which rank 0 also prints; `report.switched` tells the outcome.
    """
    register_attention()
    before = model.config._attn_implementation
    modules = {path: module for path, module in model.named_modules() if _uses_interface(module)}
    where = device or _device(model)
    with prove.undisturbed(where), torch.device(where):
        proofs = _prove(model, modules, before, where)
    sites = tuple(Site("attention", path, module, proofs[path]) for path, module in modules.items())
    report = AttentionReport(("attention",), sites, model, before)
    if report.switched:
        model.set_attn_implementation(NAME)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report)
    return report


def _uses_interface(module: nn.Module) -> bool:
    """Whether its forward, or one that it may inherit or extend, names the table of attention functions."""
    forwards = (inspect.unwrap(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls))
    return any(_INTERFACE in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters())
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _prove(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], before: str, device: torch.device
) -> dict[str, Proof]:
    """A proof for each of the modules, given by their paths."""
    layers = _layers(model, modules)
    if not layers:
        return {}
    original = "eager" if before == NAME else before
    observed = {}
    try:
        for dtype, (name, batch) in itertools.product(prove.DTYPES, _batches(device).items()):
            theirs, ours = (_observe(model, layers, i, dtype, batch, device) for i in (original, NAME))
            observed[dtype, name] = theirs, ours
    except Exception as error:
        return dict.fromkeys(modules, _failed("its layers cannot be observed", error))
    proofs: dict[Hashable, Proof] = {}
    result = {}
    for path, module in modules.items():
        layer = next((p for p in layers if path.startswith(f"{p}.")), "")
        pairs = {key: (theirs[layer], ours[layer]) for key, (theirs, ours) in observed.items() if layer in ours}
        if not pairs:
            result[path] = Proof.not_applicable("not reached by a forward pass over embeddings")
            continue
        try:
            call = _observe_call(module, pairs[prove.DTYPES[0], "plain"][0])
        except Exception as error:
            result[path] = _failed("its call of attention cannot be observed", error)
            continue
        masks = {key: (theirs["attention_mask"], ours["attention_mask"]) for key, (theirs, ours) in pairs.items()}
        kind = (type(module), call.key, repr([ours for _, ours in masks.values()]))
        if kind not in proofs:
            compare = partial(_compare, module, call, masks, original, device)
            proofs[kind] = Proof.run(Implementation(NAME, before), compare, max_ulps=_MAX_ULPS)
        result[path] = proofs[kind]
    return result


def _failed(what: str, error: Exception) -> Proof:
    return Proof(None, reason=f"{what}: {type(error).__name__}: {error}".partition("\n")[0], mismatch=True)


def _batches(device: torch.device) -> dict[str, dict[str, Tensor]]:
    index = torch.arange(_SEQ, device=device)
    return {
        "plain": {},
        "packed": {"position_ids": torch.stack((index % 8, index % 13))},
        "padded": {"attention_mask": torch.stack((index >= 5, index < 11)).long()},
    }


def _layers(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The elements of module lists that hold attention modules, the outermost of each."""
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    layers = {}
    for path in modules:
        ancestors = itertools.accumulate(path.split("."), "{}.{}".format)
        layer = next((p for p in ancestors if p.rpartition(".")[0] in lists), None)
        if layer is not None:
            layers[layer] = model.get_submodule(layer)
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


def _observe(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    implementation: str,
    dtype: torch.dtype,
    batch: dict[str, Tensor],
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """The arguments of every layer, by its path, in a forward pass over made-up embeddings."""
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
    embeds = prove.random((2, _SEQ, model.config.get_text_config().hidden_size), dtype, device, seed=0)
    try:
        copies[""](inputs_embeds=embeds, use_cache=False, **batch)
    except _Observed:
        return {path: recorder.arguments for path, recorder in recorders.items()}
    except Exception:
        if waiting:
            raise
    return {path: recorder.arguments for path, recorder in recorders.items() if recorder not in waiting}


def _with(config: Any, implementation: str) -> Any:
    """The config with this implementation, and with spans so narrow that a short sequence is beyond them."""
    config._attn_implementation = implementation
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), _WINDOW))
    return config


@dataclass(frozen=True)
class _Call:
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
class _TensorOf:
    """Stands for a tensor in `_Call.options`."""

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


def _observe_call(module: nn.Module, arguments: dict[str, Any]) -> _Call:
    """Run the module on the meta device with what its layer was called with, as far as it takes that."""
    twin = copy.deepcopy(module).to("meta")
    forward = with_globals(type(module).forward, {_INTERFACE: _Interface()})
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    accepted = {p.name: None for p in parameters if p.default is p.empty and p.kind != inspect.Parameter.VAR_KEYWORD}
    accepted |= {name: value for name, value in arguments.items() if takes_all or name in {p.name for p in parameters}}
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), accepted | {"attention_mask": None})
    try:
        forward(twin, **on_meta)
    except _CallSeen as seen:
        shapes, options = seen.args
        names = {id(p): _TensorOf("parameter", name) for name, p in twin.named_parameters(recurse=False)}
        names |= {id(t): _TensorOf("argument", name) for name, t in on_meta.items() if isinstance(t, Tensor)}
        return _Call(shapes, {k: names[id(t)] if isinstance(t, Tensor) else t for k, t in options.items()}, arguments)
    raise RuntimeError("it does not call an attention function")


def _compare(
    module: nn.Module,
    call: _Call,
    masks: Mapping[Any, tuple[Any, Any]],
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Deviation:
    namespace = inspect.unwrap(type(module).forward).__globals__
    original = namespace[_INTERFACE].get_interface(implementation, namespace.get(_EAGER))
    twin = prove.shallow_copy(module)
    for seed, (name, parameter) in enumerate(module.named_parameters(recurse=False), start=10):
        twin.register_parameter(name, nn.Parameter(prove.random(parameter.shape, dtype, device, seed=seed)))

    def value(option: Any) -> Any:
        if not isinstance(option, _TensorOf):
            return option
        return getattr(twin, option.name) if option.kind == "parameter" else call.arguments[option.name]

    options = {name: value(option) for name, option in call.options.items()}
    # Each tensor is compared as one row: a query that sees but one key has a gradient of 0, up to rounding errors as
    # large as those of its neighbours' gradients.
    leaves = [
        prove.random((math.prod(shape),), dtype, device, seed=n).requires_grad_() for n, shape in enumerate(call.shapes)
    ]
    used = leaves + [p for p in twin.parameters(recurse=False) if any(p is option for option in options.values())]

    def run(function: Callable, mask: Any, is_token: Tensor) -> Tensor:
        qkv = []
        for leaf, (batch, heads, seq, dim) in zip(leaves, call.shapes, strict=True):
            qkv.append(leaf.view(batch, seq, heads, dim).transpose(1, 2))
        out, _ = function(twin, *qkv, mask, **options)
        return (out * is_token[:, :, None, None]).flatten()

    deviations = []
    for name, batch in _batches(device).items():
        is_token = batch.get("attention_mask", torch.ones(2, _SEQ, dtype=torch.int64, device=device))
        theirs, ours = masks[dtype, name]
        if name == "packed" and isinstance(ours, AttentionMask) and ours.cu_seqlens_q is None:
            continue  # the model makes its masks without position ids: only ours keeps the documents apart
        deviations.append(
            prove.deviation(partial(run, original, theirs, is_token), partial(run, attend, ours, is_token), used)
        )
    return prove.worst(deviations)
