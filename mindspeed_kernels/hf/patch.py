"""Put fused operators into a model: find the sites, prove each kind once, replace what is proved."""

import itertools
import warnings
from collections.abc import Hashable, Iterable
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_kernels.hf import (
    documents,
    experts,
    linear_attention,
    prove,
    rms_norm,
    rms_norm_gated,
    rotary,
    swiglu,
)
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.replace import Fusion, fuse, fusion_of
from mindspeed_kernels.hf.report import Report, Site


class Operator(Protocol):
    """What a module of an operator (rms_norm.py, rotary.py, linear_attention.py, …) has."""

    name: str

    def site(self, module: nn.Module) -> Hashable | None:
        """A key that modules with the same computation share; None if this is no site by its structure."""
        ...

    def proof(self, module: nn.Module, device: torch.device) -> Proof:
        """Compare the module's computation with the fused one, on small copies of its own structure."""
        ...


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (rms_norm, rotary, swiglu, experts, rms_norm_gated, linear_attention, documents)
}


def apply(
    model: nn.Module, ops: Literal["auto"] | Iterable[str] = "auto", *, device: torch.device | None = None
) -> Report:
    """Replace parts of a Hugging Face model by fused operators, if proved: norms, rotary embeddings, SwiGLUs, experts
    and linear attention.

    Sites are found by structure, in any model. The original and the fused computation of each distinct kind of site run
    once, forward and backward, on small random inputs and weights, in float32 and bfloat16; the fused one is kept if
    they agree to the rounding of the dtype, and otherwise the site stays as it is, with a warning that says why. Only
    the forward of those instances changes: no parameter, no key of the state dict, no class, no other model.

    Call it before `fully_shard` and `torch.compile`. Models on the meta device are welcome.

    Args:
        model: any module; nothing is read but its structure, so its weights may be on the meta device.
        ops: "auto" for all, or some of "rms_norm", "rotary", "swiglu", "experts", "rms_norm_gated", "linear_attention",
            "documents" (in packed rows, for linear attention).
        device: where to compare; by default where the module's parameters are, the CPU for those on the meta device.

    Returns:
        The report, which rank 0 also prints. `report.restore()` undoes everything.

    Raises:
        ValueError: for an operator that does not exist.
    """
    operators = _select(ops)
    proofs: dict[Hashable, Proof] = {}
    sites: list[Site] = []
    for path, module in model.named_modules():
        for operator in operators:
            kind = operator.site(module)
            if kind is None:
                continue
            where = device or _device(module, model)
            key = (operator.name, kind, where, fusion_of(module), "forward" in vars(module))
            if key not in proofs:
                proofs[key] = _prove(operator, module, where)
            sites.append(Site(operator.name, path, module, proofs[key]))

    # Only now, so that an error above leaves the model as it was.
    for site in sites:
        if site.proof.fusion is not None:
            fuse(site.module, cast(Fusion, site.proof.fusion))

    report = Report(tuple(operator.name for operator in operators), tuple(sites))
    for first, *others in report.groups():
        if first.proof.mismatch:
            more = f" and {len(others)} more" if others else ""
            warnings.warn(f"{first.op}: {first.kind} ({first.path}{more}) {first.outcome}", stacklevel=2)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report)
    return report


def _select(ops: Literal["auto"] | Iterable[str]) -> list[Operator]:
    if ops == "auto":
        return list(OPERATORS.values())
    if isinstance(ops, str) or set(ops) - OPERATORS.keys():
        raise ValueError(f'ops={ops!r}: expected "auto" or a list of {", ".join(OPERATORS)}')
    return [OPERATORS[name] for name in dict.fromkeys(ops)]


def _prove(operator: Operator, module: nn.Module, device: torch.device) -> Proof:
    if fusion_of(module) is not None:
        return Proof.not_applicable("has been fused before")
    if "forward" in vars(module):
        return Proof.not_applicable("the instance has a forward of its own, set by someone else")
    with prove.undisturbed(device):
        return operator.proof(module, device)


def _device(module: nn.Module, model: nn.Module) -> torch.device:
    tensor = next(itertools.chain(module.parameters(), model.parameters()), None)
    return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device
