"""The operators under measurement, one file each with a function `cases()`."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.operators import (
    adamw,
    causal_conv1d,
    flash_attention,
    fused_experts,
    gated_delta_rule,
    grouped_gemm,
    linear_cross_entropy,
    moe_unpermute,
    muon,
    rms_norm,
    rms_norm_gated,
    rotary,
    swiglu,
)

OPERATORS = {
    "adamw_step_": adamw,
    "causal_conv1d": causal_conv1d,
    "flash_attention": flash_attention,
    "fused_experts": fused_experts,
    "gated_delta_rule": gated_delta_rule,
    "grouped_gemm": grouped_gemm,
    "linear_cross_entropy": linear_cross_entropy,
    "moe_unpermute": moe_unpermute,
    "muon": muon,
    "rms_norm": rms_norm,
    "rms_norm_gated": rms_norm_gated,
    "rotary": rotary,
    "swiglu": swiglu,
}


def cases(op: str | None = None, substring: str = "") -> Iterator[Case]:
    """The cases of one operator or of all whose names contain a substring."""
    for name, operator in OPERATORS.items():
        if op in (None, name):
            yield from (case for case in operator.cases() if substring in str(case))
