"""What `apply` did, site by site, and the way back."""

import io
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from mindspeed_kernels.hf.prove import DTYPES, Proof
from mindspeed_kernels.hf.replace import restore


@dataclass(frozen=True)
class Site:
    """A module in which an operator could be."""

    op: str
    path: str
    """The module's qualified name in the model."""
    module: nn.Module = field(repr=False)
    proof: Proof

    @property
    def fused(self) -> bool:
        return self.proof.fusion is not None

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def outcome(self) -> str:
        return str(self.proof.fusion) if self.fused else f"not fused: {self.proof.reason}"


@dataclass(frozen=True)
class Report:
    """The sites that `apply` found. Prints as a table; `restore()` takes the fused operators out again."""

    ops: tuple[str, ...]
    sites: tuple[Site, ...] = field(repr=False)

    def fused(self, op: str) -> list[str]:
        """The paths of the modules in which an operator is now."""
        return [site.path for site in self.sites if site.op == op and site.fused]

    def errors(self, op: str) -> dict[torch.dtype, float]:
        """An operator's largest relative error at its fused sites, over values and gradients."""
        return _largest_errors(site for site in self.sites if site.op == op and site.fused)

    def groups(self) -> list[list[Site]]:
        """The sites, those together that have one operator, one class and one outcome."""
        groups: dict[tuple[str, str, str], list[Site]] = {}
        for site in self.sites:
            groups.setdefault((site.op, site.kind, site.outcome), []).append(site)
        return list(groups.values())

    def restore(self) -> None:
        """Give every module that was fused its own forward back."""
        for site in self.sites:
            if site.fused:
                restore(site.module)

    def __rich__(self) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, title="Fused operators and their largest relative error", title_justify="left"
        )
        table.add_column("op", no_wrap=True)
        table.add_column("sites", justify="right")
        table.add_column("module")
        for dtype in DTYPES:
            table.add_column(str(dtype).removeprefix("torch."), justify="right", no_wrap=True)
        table.add_column("outcome")
        groups = self.groups()
        for op in self.ops:
            rows = [group for group in groups if group[0].op == op]
            for group in rows:
                errors = _largest_errors(group)
                numbers = [f"{errors[dtype]:.1e}" if dtype in errors else "" for dtype in DTYPES]
                table.add_row(op, str(len(group)), group[0].kind, *numbers, group[0].outcome)
            if not rows:
                table.add_row(op, "0", *[""] * (1 + len(DTYPES)), "no module of this structure")
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=140, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def _largest_errors(sites: Iterable[Site]) -> dict[torch.dtype, float]:
    proofs = [site.proof.deviations for site in sites]
    return {
        dtype: max(p[dtype].largest for p in proofs if dtype in p)
        for dtype in DTYPES
        if any(dtype in p for p in proofs)
    }
