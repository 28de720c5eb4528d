"""Gated RMSNorm sites: a module like an RMSNorm with a weight whose forward takes a second tensor, the gate."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

import mindspeed_kernels
from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.sites import fingerprint
from mindspeed_kernels.reference import GateActivation

name = "rms_norm_gated"


@dataclass(frozen=True)
class FusedRMSNormGated:
    """`mindspeed_kernels.rms_norm_gated` with one module's weight (the name of its parameter), eps and activation."""

    weight: str
    eps: float
    activation: GateActivation

    def build(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            if gate is None or gate.dtype != hidden_states.dtype:
                return original(module, hidden_states, gate)
            return mindspeed_kernels.rms_norm_gated(
                hidden_states, gate, getattr(module, self.weight), eps=self.eps, activation=self.activation
            )

        return forward

    def __str__(self) -> str:
        return f"eps {self.eps:g}, {self.activation}"


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if this is no gated RMSNorm by its looks."""
    parameters = list(module.parameters(recurse=False))
    if any(module.children()) or any(True for _ in module.buffers()) or [p.dim() for p in parameters] != [1]:
        return None
    if list(inspect.signature(module.forward).parameters) != ["hidden_states", "gate"] or not _epsilons(module):
        return None
    return fingerprint(module)


def proof(module: nn.Module, device: torch.device) -> Proof:
    ((weight, _),) = module.named_parameters(recurse=False)
    variants = itertools.product(_epsilons(module), get_args(GateActivation))
    fusions = [FusedRMSNormGated(weight, *variant) for variant in variants]
    return prove.nearest(Proof.run(fusion, partial(_compare, module, fusion, device)) for fusion in fusions)


def _epsilons(module: nn.Module) -> list[float]:
    return sorted({v for v in vars(module).values() if isinstance(v, float) and 0 < v <= 1e-3})


def _compare(module: nn.Module, fusion: FusedRMSNormGated, device: torch.device, dtype: torch.dtype) -> prove.Deviation:
    original = type(module).forward
    fused = fusion.build(original)
    twin = prove.shallow_copy(module)
    hidden_size = getattr(module, fusion.weight).numel()
    deviations = []
    for x_dtype, weight_dtype in prove.mixtures(dtype):
        # From rows so small that eps alone decides to rows where it vanishes.
        x = prove.random_rows((2, 12, hidden_size), x_dtype, device, decades=(-6, 3), seed=0)
        gate = (2 * prove.random(x.shape, x_dtype, device, seed=1)).requires_grad_()
        weight = 0.5 + prove.random((hidden_size,), weight_dtype, device, seed=2)
        twin.register_parameter(fusion.weight, nn.Parameter(weight))
        leaves = [x, gate, *twin.parameters()]
        deviations.append(prove.deviation(partial(original, twin, x, gate), partial(fused, twin, x, gate), leaves))
    return prove.worst(deviations)
