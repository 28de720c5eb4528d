"""What the routers of a mixture-of-experts model choose: counted, balanced through their bias, fixed for benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.skeleton import local_part, original_class
from mindspeed_llm.parallel.structure import expert_block, expert_modules, num_experts

_BIAS = "e_score_correction_bias"


class ExpertLoad:
    """Tokens that every expert got in the training forward passes since the last ``take``.

    Padding, which the model's ``attention_mask`` or the ``token_mask`` of packed rows marks, does not count. Forward
    passes of recomputation are outside of the model's own and count no token a second time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts = expert_modules(model)
        self._counts: dict[nn.Module, torch.Tensor] = {}
        self._is_counting = False
        self._mask: torch.Tensor | None = None
        if self._experts:
            # Before context parallelism's hook, which keeps the mask from the model.
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
            model.register_forward_hook(self._end)
            for experts in self._experts:
                experts.register_forward_pre_hook(self._count)

    def take(self) -> list[int]:
        """This rank's counts, an entry for every expert of every layer, and begin anew."""
        counts = [self._counts.get(e, torch.zeros(num_experts(e), dtype=torch.int64)) for e in self._experts]
        self._counts = {}
        return [count for layer in counts for count in layer.tolist()]

    def by_layer(self, counts: list[float]) -> list[torch.Tensor]:
        """What ``take`` returned, or a sum of it over ranks, as a float64 vector [num_experts] for every layer."""
        return list(torch.tensor(counts, dtype=torch.float64).split([num_experts(e) for e in self._experts]))

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._is_counting = model.training
        self._mask = kwargs.get("attention_mask", kwargs.get("token_mask"))

    def _end(self, *_: Any) -> None:
        self._is_counting = False

    @torch.no_grad()
    def _count(self, experts: nn.Module, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        if self._is_counting:
            index = args[1]  # [tokens, top_k]
            index = index if self._mask is None else index[self._mask.flatten() > 0]
            number = num_experts(experts)
            counts = torch.bincount(index.flatten(), minlength=number)[:number]  # beyond: choices that are skipped
            self._counts[experts] = self._counts[experts] + counts if experts in self._counts else counts


def worst_load(loads: list[torch.Tensor]) -> float:
    """Tokens of the busiest expert of all layers, in multiples of its layer's mean: 1 when all get the same."""
    return max(float(load.max() / load.mean()) if load.any() else 0.0 for load in loads)


class BiasBalancing:
    """Balances experts without a loss: the bias that a router adds when it chooses, and only then, follows the load.

    After a step an expert that got less than the mean becomes ``rate`` more likely to be chosen, one that got more
    becomes less (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437). The bias has no gradient.
    """

    def __init__(self, model: PreTrainedModel, rate: float) -> None:
        self._rate = rate
        self._owners = [_bias_owner(model, experts) for experts in expert_modules(model)]
        if all(owner is None for owner in self._owners):
            raise ConfigError(
                f"training.router_bias_update_rate: the routers of {original_class(model).__name__} have no {_BIAS}; "
                "set it to 0"
            )

    @torch.no_grad()
    def update(self, loads: list[torch.Tensor]) -> None:
        """``loads``: the tokens of every expert [num_experts] of every layer, over all ranks."""
        for owner, load in zip(self._owners, loads, strict=True):
            if owner is not None:
                bias = getattr(owner, _BIAS)
                local, box = local_part(bias)
                change = self._rate * torch.sign(load.mean() - load).view(bias.shape)
                local += change[box].to(local)


def _bias_owner(model: nn.Module, experts: nn.Module) -> nn.Module | None:
    """The module with the bias, in the block that ``experts`` are in."""
    for module in expert_block(model, experts).modules():
        bias = getattr(module, _BIAS, None)
        if bias is not None and bias.numel() == num_experts(experts):
            return module
    return None


def fix_routing(model: PreTrainedModel) -> None:
    """Send tokens round to all experts in turn, whatever their router says: equal loads, for benchmarks only."""
    modules = expert_modules(model)
    if not modules:
        raise ConfigError(f"optimization.fix_router: {original_class(model).__name__} has no experts to send tokens to")
    for experts in modules:
        experts.register_forward_pre_hook(_in_turn)


def _in_turn(experts: nn.Module, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    hidden_states, index, weights = args
    return (
        hidden_states,
        torch.arange(index.numel(), device=index.device).view_as(index) % num_experts(experts),
        weights,
    )
