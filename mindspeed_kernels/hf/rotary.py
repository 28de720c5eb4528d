"""Rotary sites: a forward that calls a global function `f(q, k, cos, sin)` which rotates q and k.

transformers keeps that function in the modelling module, next to the attention that calls it, and replacing it there
would change every model of the kind. So the instance gets a copy of its class's forward whose global namespace is a
copy too, in which this one name is ours.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import mindspeed_kernels
from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.prove import Proof

name = "rotary"

Rotate = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FusedRotary:
    """`mindspeed_kernels.rotary` in the place of global functions of a forward."""

    functions: tuple[str, ...]
    interleaved: bool

    def build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        namespace = inspect.unwrap(original).__globals__
        return with_globals(original, {f: self.rotation(namespace[f]) for f in self.functions})

    def rotation(self, original: Rotate) -> Rotate:
        """The fused function in the place of the function `original`."""
        interleaved = self.interleaved

        @functools.wraps(original)
        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            # The call that is proved: q, k [batch, heads, seq, head_dim], cos, sin [batch, seq, rotary_dim], no option.
            if args or kwargs or not q.dim() == k.dim() == cos.dim() + 1 == sin.dim() + 1 == 4 or q.dtype != k.dtype:
                return original(q, k, cos, sin, *args, **kwargs)
            return mindspeed_kernels.rotary(q, k, cos, sin, interleaved=interleaved)

        return rotate

    def __str__(self) -> str:
        return f"{', '.join(self.functions)}: {'interleaved' if self.interleaved else 'half-split'}"


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if its forward calls no rotary function."""
    forward = type(module).forward
    return forward if _rotary_functions(forward) else None


def proof(module: nn.Module, device: torch.device) -> Proof:
    forward = type(module).forward
    functions = _rotary_functions(forward)
    for function, original in functions.items():
        if list(inspect.signature(original).parameters)[:4] != ["q", "k", "cos", "sin"]:
            return Proof.not_applicable(f"{function}{inspect.signature(original)} does not take q, k, cos, sin")

    def compare(fusion: FusedRotary, dtype: torch.dtype) -> prove.Deviation:
        fusion.build(forward)  # can it be put there at all?
        return prove.worst(_compare(original, fusion, device, dtype) for original in functions.values())

    candidates = [FusedRotary(tuple(functions), interleaved) for interleaved in (False, True)]
    nearest = prove.nearest(Proof.run(fusion, partial(compare, fusion)) for fusion in candidates)
    return replace(nearest, reason=f"{', '.join(functions)}: {nearest.reason}" if nearest.mismatch else "")


def _rotary_functions(forward: Callable[..., Any]) -> dict[str, Rotate]:
    """The global functions a forward calls that have parameters cos and sin."""
    inner = inspect.unwrap(forward)
    if not isinstance(inner, FunctionType):
        return {}
    found = {f: inner.__globals__[f] for f in inner.__code__.co_names if f in inner.__globals__}
    return {
        f: function
        for f, function in found.items()
        if isinstance(function, FunctionType) and {"cos", "sin"} <= inspect.signature(function).parameters.keys()
    }


def _compare(original: Rotate, fusion: FusedRotary, device: torch.device, dtype: torch.dtype) -> prove.Deviation:
    batch, seq, heads, key_heads, head_dim = 2, 6, 4, 2, 16
    fused = fusion.rotation(original)
    deviations = []
    for (dtype_q, dtype_cos), cos_batch, part in itertools.product(prove.mixtures(dtype), (batch, 1), (1, 2)):
        # transformers rotates transposed views.
        q, k = (prove.random((batch, seq, n, head_dim), dtype_q, device, seed=n) for n in (heads, key_heads))
        leaves = [q.requires_grad_(), k.requires_grad_()]
        # No angle in them: what holds for any two numbers holds for every rotation, scaled or not.
        cos, sin = (prove.random((cos_batch, seq, head_dim // part), dtype_cos, device, seed=s) for s in (100, 101))
        arguments = (q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        if part > 1:
            try:
                original(*arguments)
            except RuntimeError:  # it rotates whole heads only
                continue
        deviations.append(prove.deviation(partial(original, *arguments), partial(fused, *arguments), leaves))
    return prove.worst(deviations)


def with_globals(function: Callable[..., Any], replaced: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a function in which some global names mean something else, decorators and all."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function} is no Python function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        namespace = {**function.__globals__, **replaced}
        # torch.compile looks a global up by the module's name where there is one, and would find the original there.
        namespace.pop("__name__", None)
        closure = function.__closure__
    else:
        namespace = function.__globals__
        copied_inner = with_globals(inner, replaced)
        cells = function.__closure__ or ()
        closure = tuple(CellType(copied_inner) if cell.cell_contents is inner else cell for cell in cells)
        if not any(cell.cell_contents is inner for cell in cells):
            raise ValueError(f"the decorator {function.__qualname__} does not hold the function it wraps in a closure")
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    # update_wrapper makes the function the copy's __wrapped__, which only a decorator's copy has: the inner copy.
    del vars(copy)["__wrapped__"]
    if inner is not None:
        vars(copy)["__wrapped__"] = copied_inner
    return copy
