"""AdamW over sharded float32 masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.optim.adamw import adamw

from mindspeed_kernels import adamw_step_
from mindspeed_kernels.ops.adamw import has_kernel
from mindspeed_llm.optim.local import local


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` in one fused pass over each group, whose step takes the clip coefficient along.

    The state of a parameter is torch's: ``step``, ``exp_avg``, ``exp_avg_sq``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, *, gradient_scale: float = 1.0) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, with ``gradient_scale`` times that gradient.

        Gradients may come out scaled or not: they are not meant to be read again.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters, gradient_scale)

    def _step(self, group: dict[str, Any], parameters: list[torch.nn.Parameter], gradient_scale: float) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        masters = [local(parameter) for parameter in parameters]
        gradients = [local(cast(torch.Tensor, parameter.grad)) for parameter in parameters]
        means, squares = ([local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        options = {key: group[key] for key in ("lr", "eps", "weight_decay")} | {"beta1": beta1, "beta2": beta2}
        if has_kernel((*masters, *means, *squares), gradients):
            torch._foreach_add_(steps, 1)
            counts = [int(step) for step in steps]
            adamw_step_(masters, gradients, means, squares, counts, grad_scale=gradient_scale, **options)
            return
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        adamw(masters, gradients, means, squares, [], steps, fused=True, amsgrad=False, maximize=False, **options)

    def _state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
