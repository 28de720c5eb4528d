"""Linear attention across a context-parallel group: gated delta rules and causal convolutions of unmodified models.

The modules of transformers that compute them (of Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear; LFM2's convolutions) do
so in two functions that their forward names; everything else in it treats each token by itself. So the forward stays as
it is, and these two reach over the ranks:

* the convolution gets the few tokens before a rank's own from the ranks that have them;
* the delta rule, whose state goes through the whole sequence, gets all tokens of some heads, in their true order.

No parameter is cut: each rank applies all of them to its own tokens, and so gradients add up as everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_kernels.hf.linear_attention import FusedLinearAttention
from mindspeed_kernels.hf.replace import fuse, fusion_of
from mindspeed_kernels.hf.rotary import with_globals
from mindspeed_llm.parallel.context.attention import ContextAttention
from mindspeed_llm.parallel.context.layout import SequenceLayout
from mindspeed_llm.parallel.context.ulysses import gather, repeat_for_ranks, to_heads, to_sequence

METHODS = {
    "causal_conv1d_fn": "convolve",
    "torch_chunk_gated_delta_rule": "delta_rule",  # with a decay per head
    "chunk_kimi_delta_attention": "delta_rule",  # per channel
}
"""The names of the functions in transformers, and of what takes their place."""


def functions_of(module: nn.Module) -> set[str]:
    """Which of these functions a module's forward names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return METHODS.keys() & set(code.co_names if code else ())


@dataclass(frozen=True)
class MixerForward:
    """A fusion (see ``mindspeed_kernels.hf.replace``): a module's own forward with other functions under these names,
    methods of the module's ``context_parallel``. Each gets the function that it stands for first."""

    fused: FusedLinearAttention | None = None
    """What the module has been fused with before: its operators are then those functions."""

    def build(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        own = inspect.unwrap(original)
        namespace = inspect.unwrap(self.fused.build(own) if self.fused else own).__globals__
        functions = {
            name: partial(_on_behalf, method, namespace[name])
            for name, method in METHODS.items()
            if name in own.__code__.co_names
        }
        rebound = with_globals(own, functions)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            # Mixers hand their keyword arguments on to these functions, which so learn who calls them.
            return rebound(module, *args, **kwargs, context_parallel=module.context_parallel)

        return forward


def reach_over_ranks(mixer: nn.Module, functions: Any) -> None:
    """Let ``mixer`` mix tokens by the methods of ``functions`` that ``METHODS`` names."""
    fused = fusion_of(mixer)
    fuse(mixer, MixerForward(fused if isinstance(fused, FusedLinearAttention) else None))
    mixer.context_parallel = functions


@torch.compiler.disable  # it exchanges with other ranks
def _on_behalf(method: str, own: Callable, *args: Any, context_parallel: Any, **kwargs: Any) -> Any:
    return getattr(context_parallel, method)(own, *args, **kwargs)


class ContextMixing:
    """The two functions, for a model whose attention is ``attend``: it knows the present micro-batch and the groups."""

    def __init__(self, attend: ContextAttention) -> None:
        self.attend = attend
        self.groups = (attend.ulysses, attend.ring)  # the inner one first
        self.rank = attend.ring.rank() * attend.ulysses.size() + attend.ulysses.rank()
        self.ranks = attend.ring.size() * attend.ulysses.size()

    @property
    def layout(self) -> SequenceLayout:
        return self.attend.present_layout()

    def convolve(self, own: Callable, hidden_states: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        """From this rank's ``[batch, channels, seq]`` to its output, within documents; ``weight [channels, width]``."""
        halves = hidden_states.transpose(1, 2).unflatten(1, (2, -1))  # [batch, 2, half, channels]
        batch, _, half, _ = halves.shape
        reach = weight.shape[-1] - 1
        halo = self.layout.halo(self.rank, reach)
        given = gather(halves[:, :, half - min(reach, half) :], self.groups)  # [ranks, batch, 2, given, channels]
        before = given.transpose(0, 1).flatten(1, 3)[:, halo.index.to(given.device)]
        before = before.masked_fill(~halo.visible.to(given.device)[..., None], 0)  # as before the first token
        tokens = torch.cat([before, halves], dim=2).flatten(0, 2)[None]  # [1, batch * 2 * (reach + half), channels]
        convolve = partial(own, weight=weight, **_named(args, "bias", "activation"), **options)
        out = _by_sequence(lambda x: convolve(x.transpose(1, 2)).transpose(1, 2), [tokens], halo.cu_seqlens)
        return out.view(batch, 2, reach + half, -1)[:, :, reach:].flatten(1, 2).transpose(1, 2)

    def delta_rule(
        self, own: Callable, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """From this rank's ``[batch, seq, heads, dim]`` to its output; ``beta [batch, seq, heads]``, and so, or like
        ``key``, ``g``."""
        query, key = (repeat_for_ranks(x, self.ranks) for x in (query, key))
        q, k, v = self._to_heads((query, key, value))
        gates = (g if g.dim() == 4 else g.unsqueeze(3), beta.unsqueeze(3).to(g.dtype))
        decay, strength = self._to_heads(gates)
        decay, strength = decay if g.dim() == 4 else decay.squeeze(3), strength.squeeze(3).to(beta.dtype)

        def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
            return own(q, k, v, g=decay, beta=strength, **options)[0]

        tokens = [x.flatten(0, 1)[None] for x in (q, k, v, decay, strength)]
        out = _by_sequence(rule, tokens, self.layout.cu_seqlens)
        return self._to_sequence(out.view_as(v)), None

    def _to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From this rank's tokens of all heads to all tokens, in the order of the rows, of this rank's heads."""
        for group in self.groups:
            tensors = to_heads(tensors, group)
        order = self.layout.held.flatten().argsort().to(tensors[0].device)
        return [x.index_select(1, order) for x in tensors]

    def _to_sequence(self, x: Tensor) -> Tensor:
        x = x.index_select(1, self.layout.held.flatten().to(x.device))
        for group in reversed(self.groups):
            x = to_sequence(x, group)
        return x


def _by_sequence(function: Callable[..., Tensor], tensors: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    """``function`` of each sequence of ``tensors [1, tokens, ...]`` by itself."""
    return torch.cat([function(*(x[:, a:b] for x in tensors)) for a, b in pairwise(cu_seqlens.tolist())], dim=1)


def _named(args: Sequence[Any], *names: str) -> dict[str, Any]:
    return dict(zip(names, args, strict=False))
