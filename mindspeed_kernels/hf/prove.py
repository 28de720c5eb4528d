"""Does a fused computation equal the original one? Both run on the same random input, forward and backward."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mindspeed_kernels.hf.replace import Variant

# Units in the last place by which two correct results may differ, by dtype. In bfloat16 eager code rounds up to three
# times where a fused operator rounds once (rotary: q*cos, rotate(q)*sin, their sum), half a unit each, and so does its
# backward; the arithmetic between is float32 in both. In float32 every operation of the chain rounds, a dozen of them
# and as many in the backward, in sums of different order: up to 6 units were seen over hidden sizes 16 to 16384.
MAX_ULPS = {torch.float32: 16, torch.bfloat16: 4}
DTYPES = tuple(MAX_ULPS)


def mixtures(dtype: torch.dtype) -> list[tuple[torch.dtype, torch.dtype]]:
    """The pairs of dtypes, for two inputs that need not have the same, of which `dtype` is the coarser.

    Under autocast half-precision activations meet float32 parameters, and under FSDP the other way round as well.
    """
    usual = DTYPES[: DTYPES.index(dtype) + 1]
    return [(a, b) for a, b in itertools.product(usual, usual) if dtype in (a, b)]


@dataclass(frozen=True)
class Deviation:
    """How far two computations are apart, relative to the larger of an element and the root mean square of its row."""

    largest: float
    """Over outputs and gradients."""
    typical: float
    """The mean over the outputs. One rounding in another place is within the tolerance, and shows here."""


Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Proof:
    """What comparing a site with a fused operator has shown: the fusion that may replace it, or why none may."""

    fusion: Variant | None
    deviations: Mapping[torch.dtype, Deviation] = field(default_factory=dict)
    reason: str = ""
    """Why not."""
    mismatch: bool = False
    """It looked like the operator and computes something else (against: it never was a site of this operator)."""

    @classmethod
    def not_applicable(cls, reason: str) -> "Proof":
        return cls(None, reason=reason)

    @classmethod
    def run(
        cls,
        fusion: Variant,
        compare: Callable[[torch.dtype], Deviation],
        *,
        layers: int = 1,
        max_ulps: Mapping[torch.dtype, int] = MAX_ULPS,
    ) -> "Proof":
        """Compare in every dtype that matters; `compare` may raise what an original forward raises on a small input.

        `layers`: how many operators with roundings of their own, `max_ulps` each, the computation has in sequence.
        """
        deviations = {}
        for dtype in DTYPES:
            dtype_name = str(dtype).removeprefix("torch.")
            try:
                deviations[dtype] = compare(dtype)
            except Exception as error:
                reason = f"cannot be compared in {dtype_name}: {type(error).__name__}: {error}".partition("\n")[0]
                return cls(None, deviations, reason, mismatch=True)
            allowed = layers * max_ulps[dtype] * torch.finfo(dtype).eps
            if deviations[dtype].largest > allowed:
                reason = f"differs by {deviations[dtype].largest:.1e} in {dtype_name}, {allowed:.1e} is allowed"
                return cls(None, deviations, reason, mismatch=True)
        return cls(fusion, deviations)

    @property
    def distance(self) -> tuple[bool, float]:
        """Orders the proofs of several candidates for one site: those that hold first, the nearest of them ahead.

        Candidates that hold in every dtype may differ in where they round, which the last, coarsest dtype shows.
        """
        if self.fusion is not None:
            return False, self.deviations[DTYPES[-1]].typical
        return True, max((d.largest / torch.finfo(t).eps for t, d in self.deviations.items()), default=math.inf)


def nearest(proofs: Iterable[Proof]) -> Proof:
    return min(proofs, key=lambda proof: proof.distance)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """PyTorch's default modes, whatever the caller's, and no warnings about the inputs made up here."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def deviation(original: Callable[[], Outputs], fused: Callable[[], Outputs], leaves: Sequence[Tensor]) -> Deviation:
    """Compare the outputs of two computations and their gradients with respect to `leaves` (which require grad).

    Raises what the computations raise, and `ValueError` if they return unlike tensors.
    """
    expected, actual = _as_tuple(original()), _as_tuple(fused())
    if (want := [_kind(t) for t in expected]) != (got := [_kind(t) for t in actual]):
        raise ValueError(f"the original returns {want}, the fused one {got}")
    cotangents = [random(t.shape, t.dtype, t.device, seed=7 + i) for i, t in enumerate(expected)]
    gradients = torch.autograd.grad(expected, leaves, cotangents), torch.autograd.grad(actual, leaves, cotangents)
    pairs = [*zip(expected, actual, strict=True), *zip(*gradients, strict=True)]
    errors = [_relative_error(a, b) for a, b in pairs]
    typical = max(error.mean().item() for error in errors[: len(expected)])
    return Deviation(max(error.max().item() for error in errors), typical)


def worst(deviations: Iterable[Deviation]) -> Deviation:
    """The deviation of several comparisons together."""
    deviations = list(deviations)
    return Deviation(max(d.largest for d in deviations), max(d.typical for d in deviations))


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, seed: int) -> Tensor:
    """Standard normal numbers that leave the global random state alone."""
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    return values.to(device, dtype)


def random_rows(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, decades: tuple[float, float], seed: int
) -> Tensor:
    """Random rows whose sizes run over `10**decades`, in which a clamp, a misplaced eps or a scale cannot hide."""
    values = random(shape, torch.float32, device, seed=seed)
    rows = values.numel() // shape[-1]
    sizes = torch.logspace(*decades, rows, device=device, dtype=torch.float32).view(*shape[:-1], 1)
    return (values * sizes).to(dtype).requires_grad_()


def shallow_copy(module: nn.Module) -> nn.Module:
    """The module's class and attributes, with parameters and children that can be exchanged without touching it."""
    copy = type(module).__new__(type(module))
    copy.__dict__.update(vars(module))
    copy._parameters, copy._modules = dict(module._parameters), dict(module._modules)
    return copy


def _relative_error(expected: Tensor, actual: Tensor) -> Tensor:
    a, b = expected.detach().double(), actual.detach().double()
    size = torch.maximum(a.abs(), a.square().mean(-1, keepdim=True).sqrt())
    error = (a - b).abs() / size.clamp_min(torch.finfo(torch.float32).tiny)
    return error.nan_to_num(nan=torch.inf)


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
