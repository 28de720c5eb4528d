"""RMSNorm sites: a module without children, with at most a one-dimensional weight and a small constant, its eps."""

import inspect
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import mindspeed_kernels
from mindspeed_kernels.hf import prove, rms_norm_gated
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.sites import fingerprint, takes_one_tensor
from mindspeed_kernels.reference import CastOrder

name = "rms_norm"


@dataclass(frozen=True)
class FusedRMSNorm:
    """`mindspeed_kernels.rms_norm` with one module's weight (the name of its parameter), eps and conventions."""

    weight: str | None
    eps: float
    zero_centered: bool = False
    cast_order: CastOrder = "hf"

    def build(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: nn.Module, x: Tensor) -> Tensor:
            weight = getattr(module, self.weight) if self.weight else None
            return mindspeed_kernels.rms_norm(
                x, weight, eps=self.eps, zero_centered=self.zero_centered, cast_order=self.cast_order
            )

        return forward

    def __str__(self) -> str:
        factor = "1 + w" if self.zero_centered else "w"
        return f"eps {self.eps:g}" + (f", {factor}, {self.cast_order} cast order" if self.weight else "")


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if this is no RMSNorm by its looks."""
    if any(module.children()) or any(True for _ in module.buffers()) or not _small_constants(module):
        return None
    weights = list(module.parameters(recurse=False))
    if any(w.dim() != 1 for w in weights) or (not weights and not takes_one_tensor(module)):
        return None
    return None if rms_norm_gated.site(module) else fingerprint(module)


def proof(module: nn.Module, device: torch.device) -> Proof:
    weights = dict(module.named_parameters(recurse=False))
    if len(weights) > 1:
        return Proof.not_applicable(f"has the parameters {', '.join(weights)}, an RMSNorm has one weight")
    if not takes_one_tensor(module):
        return Proof.not_applicable(f"forward takes {', '.join(inspect.signature(module.forward).parameters)}")

    weight = next(iter(weights), None)
    # Several variants may pass (another cast order moves a quarter of the elements, but by one unit of bfloat16 only),
    # so the nearest counts.
    return prove.nearest(Proof.run(f, partial(_compare, module, f, device)) for f in _variants(module, weight))


def _variants(module: nn.Module, weight: str | None) -> list[FusedRMSNorm]:
    epsilons = _small_constants(module)
    if weight is None:
        return [FusedRMSNorm(None, eps) for eps in epsilons]
    orders: tuple[CastOrder, ...] = ("hf", "float32")
    return [FusedRMSNorm(weight, *convention) for convention in itertools.product(epsilons, (False, True), orders)]


def _small_constants(module: nn.Module) -> list[float]:
    return sorted({v for v in vars(module).values() if isinstance(v, float) and 0 < v <= 1e-3})


def _compare(module: nn.Module, fusion: FusedRMSNorm, device: torch.device, dtype: torch.dtype) -> prove.Deviation:
    original = type(module).forward
    fused = fusion.build(original)
    twin = prove.shallow_copy(module)
    hidden_size = getattr(module, fusion.weight).numel() if fusion.weight else 64
    deviations = []
    for x_dtype, weight_dtype in prove.mixtures(dtype) if fusion.weight else [(dtype, dtype)]:
        # From rows so small that eps alone decides to rows where it vanishes.
        x = prove.random_rows((2, 12, hidden_size), x_dtype, device, decades=(-6, 3), seed=0)
        if fusion.weight:
            # Neither ones nor zeros, which make `w * x`, `(1 + w) * x` and their cast orders look alike.
            weight = 0.5 + prove.random((hidden_size,), weight_dtype, device, seed=1)
            twin.register_parameter(fusion.weight, nn.Parameter(weight))
        leaves = [x, *twin.parameters()]
        deviations.append(prove.deviation(partial(original, twin, x), partial(fused, twin, x), leaves))
    return prove.worst(deviations)
