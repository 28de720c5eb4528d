"""Linear attention: a forward that calls a gated delta rule and a causal convolution by their global names.

As with rotary embeddings, the instance gets a copy of its class's forward in which these names mean the fused
operators. They keep packed sequences apart where the original functions cannot.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mindspeed_kernels
from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.rotary import with_globals
from mindspeed_kernels.ops._common import has_kernel

name = "linear_attention"

_DELTA_RULE = ("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_CONVOLUTION = ("hidden_states", "weight", "bias", "activation")
Shapes = dict[str, tuple[int, ...]]
_MAX_ULPS = prove.MAX_ULPS | {torch.float32: 128}
"""In float32 transformers takes a decay as the exponential of a difference of two sums over up to 64 tokens. Those of
the decays made up here reach 51, and each is off by half of 51 units in the last place: 51 units of the decay. It is 40
to 60 units off float64, ours, whose decays are products, 8 to 22. The limit is twice what that may add up to."""


@dataclass(frozen=True)
class FusedLinearAttention:
    """`mindspeed_kernels.gated_delta_rule` and `causal_conv1d` in the place of global functions of a forward."""

    delta_rules: tuple[str, ...]
    convolutions: tuple[str, ...]

    def build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        namespace = inspect.unwrap(original).__globals__
        rules = {f: _delta_rule(namespace[f]) for f in self.delta_rules}
        return with_globals(original, rules | {f: _convolution(namespace[f]) for f in self.convolutions})

    def __str__(self) -> str:
        return ", ".join((*self.delta_rules, *self.convolutions))


def _delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not has_kernel(query, key, value, g, beta, initial_state) or not query.dtype == key.dtype == value.dtype:
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )
        out, state = mindspeed_kernels.gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            qk_l2norm=use_qk_l2norm_in_kernel,
            initial_state=initial_state,
            return_final_state=True,
            cu_seqlens=kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens,  # some mixers hand it on so
        )
        return out, state if output_final_state else None

    return rule


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        known = activation in ("silu", None) and kwargs.get("seq_idx") is None and kwargs.get("cu_seqlens") is None
        if not known or not has_kernel(hidden_states, weight, bias):
            return original(hidden_states, weight=weight, bias=bias, activation=activation, **kwargs)
        y = mindspeed_kernels.causal_conv1d(
            hidden_states.transpose(1, 2),
            weight,
            bias,
            activation="silu" if activation else None,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),  # what the mixers of transformers are called with
        )
        return y.transpose(1, 2)

    return convolve


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if its forward calls no gated delta rule."""
    forward = type(module).forward
    return forward if _functions(forward, _DELTA_RULE) else None


def proof(module: nn.Module, device: torch.device) -> Proof:
    forward = type(module).forward
    rules, convolutions = _functions(forward, _DELTA_RULE), _functions(forward, _CONVOLUTION, without="conv_state")
    shapes: dict[str, Shapes] = {}
    for function, rule in rules.items():
        taken = _shapes_taken(rule, device)
        if taken is None:
            return Proof.not_applicable(f"{function} takes no decay per head or per channel")
        shapes[function] = taken
    fusion = FusedLinearAttention(tuple(rules), tuple(convolutions))

    def compare(dtype: torch.dtype) -> prove.Deviation:
        fusion.build(forward)  # can it be put there at all?
        of_rules = (d for f, rule in rules.items() for d in _compare_rules(rule, shapes[f], device, dtype))
        of_convolutions = (d for c in convolutions.values() for d in _compare_convolutions(c, device, dtype))
        return prove.worst(itertools.chain(of_rules, of_convolutions))

    return Proof.run(fusion, compare, max_ulps=_MAX_ULPS)


def _functions(forward: Callable[..., Any], arguments: tuple[str, ...], without: str = "") -> dict[str, Callable]:
    """The global functions that a forward calls which have these parameters."""
    inner = inspect.unwrap(forward)
    code = getattr(inner, "__code__", None)
    found = {f: inner.__globals__[f] for f in code.co_names if f in inner.__globals__} if code else {}
    return {
        f: function
        for f, function in found.items()
        if inspect.isfunction(function)
        and set(arguments) <= (names := inspect.signature(function).parameters.keys())
        and without not in names
    }


_BATCH, _SEQ = 2, 70  # more than a chunk
_ENDS = (0, 9, _SEQ, _SEQ + 66, _BATCH * _SEQ)
"""Packed sequences: two a row."""
_PER_HEAD: Shapes = {
    "query": (_BATCH, _SEQ, 2, 8),
    "key": (_BATCH, _SEQ, 2, 8),
    "value": (_BATCH, _SEQ, 4, 6),
    "g": (_BATCH, _SEQ, 4),
    "beta": (_BATCH, _SEQ, 4),
    "initial_state": (_BATCH, 4, 8, 6),
}
_PER_CHANNEL = _PER_HEAD | dict.fromkeys(("query", "key", "g"), (_BATCH, _SEQ, 4, 8))
"""Of the decay. What takes one per channel repeats no keys."""


# Each tensor is one row to the comparison, as in that of attention: single heads may have gradients of about 0.


def _shapes_taken(rule: Callable[..., Any], device: torch.device) -> Shapes | None:
    """What kind of decay the rule has, found out by calling it."""
    for shapes in (_PER_HEAD, _PER_CHANNEL):
        with contextlib.suppress(RuntimeError, IndexError):
            _run_rule(rule, shapes, _rule_leaves(shapes, torch.float32, device))
            return shapes
    return None


def _rule_leaves(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    leaves = {}
    for seed, (argument, shape) in enumerate(shapes.items()):
        values = prove.random((math.prod(shape),), torch.float32, device, seed=seed)
        if argument == "key":
            values = values / 8**0.5
        elif argument == "g":
            values = -values.abs()
        elif argument == "beta":
            values = values.sigmoid()
        wide = argument in ("g", "initial_state")
        leaves[argument] = values.to(torch.float32 if wide else dtype).requires_grad_()
    return leaves


def _run_rule(
    rule: Callable[..., Any], shapes: Shapes, leaves: dict[str, Tensor], **options: Any
) -> tuple[Tensor, Tensor]:
    tensors = {argument: leaf.view(shapes[argument]) for argument, leaf in leaves.items()}
    out, state = rule(**tensors, output_final_state=True, **options)
    return out.flatten(), state.flatten()


def _compare_rules(
    original: Callable[..., Any], shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> Iterator[prove.Deviation]:
    fused, leaves = _delta_rule(original), _rule_leaves(shapes, dtype, device)
    for l2norm in (True, False):
        theirs, ours = (
            partial(_run_rule, rule, shapes, leaves, use_qk_l2norm_in_kernel=l2norm) for rule in (original, fused)
        )
        yield prove.deviation(theirs, ours, list(leaves.values()))

    del leaves["initial_state"]
    tensors = {argument: leaf.view(shapes[argument]) for argument, leaf in leaves.items()}
    without = {"initial_state": None, "output_final_state": False}  # not every rule has these defaults

    def one_by_one() -> Tensor:
        outs = (original(**sequence, **without, use_qk_l2norm_in_kernel=True)[0] for sequence in _sequences(tensors))
        return torch.cat(list(outs), 1).flatten()

    def packed(name: str) -> Tensor:
        ends = {name: torch.tensor(_ENDS, device=device)}
        return fused(**tensors, use_qk_l2norm_in_kernel=True, **ends)[0].flatten()

    for name in ("cu_seqlens", "cu_seq_lens_q"):
        yield prove.deviation(one_by_one, partial(packed, name), list(leaves.values()))


def _compare_convolutions(
    original: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
) -> Iterator[prove.Deviation]:
    x = prove.random((_BATCH * _SEQ * 6,), dtype, device, seed=0).requires_grad_()
    weight, bias = (prove.random(shape, dtype, device, seed=1).requires_grad_() for shape in ((6, 4), (6,)))
    for b, activation in itertools.product((bias, None), ("silu", None)):
        yield from _compare_convolution(original, x, {"weight": weight, "bias": b, "activation": activation})


def _compare_convolution(
    original: Callable[..., Tensor], leaf: Tensor, options: dict[str, Any]
) -> Iterator[prove.Deviation]:
    fused, x = _convolution(original), leaf.view(_BATCH, _SEQ, -1)
    leaves = [leaf, *(t for t in options.values() if isinstance(t, Tensor))]

    def convolve(function: Callable[..., Tensor], x: Tensor = x, **packing: Tensor) -> Tensor:
        return function(x.transpose(1, 2), **options, **packing).transpose(1, 2).flatten()

    def one_by_one() -> Tensor:
        return torch.cat([convolve(original, **sequence) for sequence in _sequences({"x": x})])

    ends = torch.tensor(_ENDS, device=x.device)
    yield prove.deviation(partial(convolve, original), partial(convolve, fused), leaves)
    yield prove.deviation(one_by_one, partial(convolve, fused, cu_seq_lens_q=ends), leaves)


def _sequences(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each packed sequence by itself, as a batch of one."""
    for a, b in itertools.pairwise(_ENDS):
        yield {argument: t.flatten(0, 1)[None, a:b] for argument, t in tensors.items()}
