"""AdamW over sharded float32 masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mindspeed_kernels import adamw_step_
from mindspeed_kernels.ops.adamw import has_kernel
from mindspeed_llm.optim.local import local


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose step takes the clip coefficient along.

    Where ``mindspeed_kernels`` has a kernel, a step is one pass over all parameters of a group, clipping included;
    elsewhere it is torch's fused one. The state is torch's in both cases.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(self, *, gradient_scale: float = 1.0) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, with ``gradient_scale`` times that gradient.

        Gradients may come out scaled or not: they are not meant to be read again.
        """
        gradients = [local(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        masters = [local(p) for group in self.param_groups for p in group["params"]]
        if has_kernel(masters, gradients):
            for group in self.param_groups:
                self._step(group, gradient_scale)
            return
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        super().step()

    def _step(self, group: dict[str, Any], gradient_scale: float) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self._state_of(p) for p in parameters]
        for state in states:
            state["step"] += 1
        beta1, beta2 = group["betas"]
        adamw_step_(
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [int(state["step"]) for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=gradient_scale,
        )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
