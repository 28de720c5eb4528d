"""The operators under measurement, one file each with a function `cases()`."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.operators import (
    adamw,
    flash_attention,
    fused_experts,
    grouped_gemm,
    linear_cross_entropy,
    moe_unpermute,
    newton_schulz,
    rms_norm,
    rotary,
    swiglu,
)

OPERATORS = {
    "adamw_step_": adamw,
    "flash_attention": flash_attention,
    "fused_experts": fused_experts,
    "grouped_gemm": grouped_gemm,
    "linear_cross_entropy": linear_cross_entropy,
    "moe_unpermute": moe_unpermute,
    "newton_schulz": newton_schulz,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "swiglu": swiglu,
}


def cases(op: str | None = None, substring: str = "") -> Iterator[Case]:
    """The cases of one operator or of all whose names contain a substring."""
    for name, operator in OPERATORS.items():
        if op in (None, name):
            yield from (case for case in operator.cases() if substring in str(case))
