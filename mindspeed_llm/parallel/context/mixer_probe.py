"""Proof that a module mixes tokens in nothing but a convolution and a delta rule, found out by calling it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_kernels.hf import prove
from mindspeed_llm.parallel.context.linear_attention import METHODS, functions_of, reach_over_ranks

_TOKENS = 5


class NotTokenwiseError(Exception):
    """Why a module is not one whose two functions are all that tokens have to do with each other."""


def probe(mixer: nn.Module, hidden_size: int) -> int | None:
    """How many value heads the delta rule of ``mixer`` has; None if it has none.

    A copy with random weights runs with stand-ins for the two functions that treat each token by itself. Then the
    copy must do so as well: tokens in another order have the same results in that order.

    Raises NotTokenwiseError that says what is otherwise.
    """
    twin: Any = copy.deepcopy(mixer).to_empty(device="cpu").float()
    stand_in = _Tokenwise()
    reach_over_ranks(twin, stand_in)
    tokens = prove.random((1, _TOKENS, hidden_size), torch.float32, torch.device("cpu"), seed=0)
    order = torch.randperm(_TOKENS, generator=torch.Generator().manual_seed(0))
    with prove.undisturbed(tokens.device), torch.no_grad():
        for seed, tensor in enumerate([*twin.parameters(), *twin.buffers()]):
            tensor.copy_(prove.random(tensor.shape, torch.float32, tokens.device, seed=1 + seed))
        try:
            results, reordered = (_tensor(twin(x)) for x in (tokens, tokens[:, order]))
        except Exception as error:  # whatever a modelling file may raise
            raise NotTokenwiseError(
                f"cannot be followed: {type(error).__name__}: {error}".partition("\n")[0]
            ) from error
    if missing := {name for name in functions_of(mixer) if METHODS[name] not in stand_in.called}:
        raise NotTokenwiseError(f"does not call {', '.join(sorted(missing))}")
    if not torch.allclose(results[:, order], reordered, rtol=1e-4, atol=1e-4 * float(results.abs().max())):
        raise NotTokenwiseError("mixes tokens in other ways than by convolution and gated delta rule")
    return stand_in.num_heads


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class _Tokenwise:
    """In the place of ``ContextMixing``: every argument has a part in the result."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.num_heads: int | None = None

    def convolve(self, own: Callable, hidden_states: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        self.called.add("convolve")
        return hidden_states * weight.sum(-1)[:, None]

    def delta_rule(
        self, own: Callable, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        self.called.add("delta_rule")
        self.num_heads = value.shape[2]
        similarity = (query * key).sum((2, 3)).tanh()
        decay = g.tanh() if g.dim() == 3 else g.tanh().mean(3)
        return value * (decay + beta)[..., None] * similarity[..., None, None], None
