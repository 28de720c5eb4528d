"""Switch a model to `flash_attention`, if its own attention proves to compute the same.

The switch is one for the whole model, because masks are made once for all layers. What a model asks of attention is
observed (observe.py), not guessed. First, the masks: its forward runs on a few small batches up to its last layer, with
a recorder in the place of every layer, once for each implementation. Second, the call: each attention module runs on
the meta device up to the point where it calls its attention function. On inputs of these shapes, with these arguments
and masks, the model's own attention function and ours then run forward and backward.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.attention import NAME, attend, register_attention
from mindspeed_kernels.hf.observe import (
    INTERFACE,
    AttentionCall,
    TensorOf,
    attention_call,
    attention_layers,
    layer_arguments,
    uses_interface,
)
from mindspeed_kernels.hf.prove import Deviation, Proof
from mindspeed_kernels.hf.report import Report, Site

_EAGER = "eager_attention_forward"
_SEQ = 14
"""Of the batches that are compared: more than `observe.WINDOW`, to which a model's windows are narrowed."""
_MAX_ULPS = {torch.float32: 512, torch.bfloat16: 16}
"""More than for an elementwise operator: the terms of a logit are many times its size, the exponential multiplies their
rounding errors, and the gradient is a difference of such sums. In float32 up to 90 units were seen over heads of 64 to
256, and up to 230 with unscaled logits; what is another computation differs by a thousand times as much."""


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
    modules = {path: module for path, module in model.named_modules() if uses_interface(module)}
    where = device or _device(model)
    with prove.undisturbed(where), torch.device(where):
        proofs = _prove(model, modules, before, where)
    if any(proof.fusion is None for proof in proofs.values()):
        together = "proved equal, but the model can only be switched as a whole"
        proofs = {path: replace(p, fusion=None, reason=p.reason or together) for path, p in proofs.items()}
    sites = tuple(Site("attention", path, module, proofs[path]) for path, module in modules.items())
    report = AttentionReport(("attention",), sites, model, before)
    if report.switched:
        model.set_attn_implementation(NAME)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report)
    return report


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters())
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _prove(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], before: str, device: torch.device
) -> dict[str, Proof]:
    """A proof for each of the modules, given by their paths."""
    layers = attention_layers(model, modules)
    if not layers:
        return {}
    original = "eager" if before == NAME else before
    observed = {}
    try:
        for dtype, (name, batch) in itertools.product(prove.DTYPES, _batches(device).items()):
            embeds = prove.random((2, _SEQ, model.config.get_text_config().hidden_size), dtype, device, seed=0)
            theirs, ours = (layer_arguments(model, layers, i, embeds, batch) for i in (original, NAME))
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
            call = attention_call(module, pairs[prove.DTYPES[0], "plain"][0])
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


def _compare(
    module: nn.Module,
    call: AttentionCall,
    masks: Mapping[Any, tuple[Any, Any]],
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Deviation:
    namespace = inspect.unwrap(type(module).forward).__globals__
    original = namespace[INTERFACE].get_interface(implementation, namespace.get(_EAGER))
    twin = prove.shallow_copy(module)
    for seed, (name, parameter) in enumerate(module.named_parameters(recurse=False), start=10):
        twin.register_parameter(name, nn.Parameter(prove.random(parameter.shape, dtype, device, seed=seed)))

    def value(option: Any) -> Any:
        if not isinstance(option, TensorOf):
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
        if name == "packed" and _equal(theirs, masks[dtype, "plain"][0]):
            continue  # the model makes its masks without position ids: only ours keeps the documents apart
        deviations.append(
            prove.deviation(partial(run, original, theirs, is_token), partial(run, attend, ours, is_token), used)
        )
    return prove.worst(deviations)


def _equal(mask: Any, other: Any) -> bool:
    return mask is other or (isinstance(mask, Tensor) and isinstance(other, Tensor) and torch.equal(mask, other))
