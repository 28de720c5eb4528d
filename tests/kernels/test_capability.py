"""Instruction sets: the choice at run time, and the operators' tests on each of them that this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_kernels
from mindspeed_kernels import _C

LEVELS = ["default", "avx2", "avx512", "avx512_bf16", "amx"]
TESTS = Path(__file__).parent
OPERATOR_TESTS = [
    str(TESTS / f"test_{name}.py")
    for name in (
        "adamw",
        "causal_conv1d",
        "conversion",
        "flash_attention",
        "flash_attention_masks",
        "fused_experts",
        "gated_delta_rule",
        "grouped_gemm",
        "linear_cross_entropy",
        "moe_permute",
        "newton_schulz",
        "rms_norm",
        "rms_norm_gated",
        "rotary",
        "swiglu",
    )
]


def run(capability: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MINDSPEED_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "2"}
    return subprocess.run([sys.executable, *args], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS[: LEVELS.index(_C.cpu_capability())] if level != "amx"])
def test_operators_on_lower_levels(level: str) -> None:
    """The whole tests once more for each level below the one that this process uses."""
    result = run(level, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *OPERATOR_TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_kernels_follow_the_environment() -> None:
    result = run("default", "-c", "from mindspeed_kernels import _C; print(*set(_C.cpu_kernels().values()))")
    assert result.stdout.split() == ["default"], result.stderr


def test_no_level_above_the_machine() -> None:
    result = run("amx", "-c", "from mindspeed_kernels import _C; print(_C.cpu_capability())")
    assert result.stdout.strip() == _C.detected_cpu_capability(), result.stderr


def test_unknown_level() -> None:
    result = run("avx9", "-c", "import mindspeed_kernels")
    assert (
        "ValueError: MINDSPEED_CPU_CAPABILITY=avx9 is not one of default avx2 avx512 avx512_bf16 amx" in result.stderr
    )


def test_report() -> None:
    result = run("default", "-m", "mindspeed_kernels")
    assert result.returncode == 0, result.stderr
    composed = {"route", "newton_schulz"}  # of PyTorch's operators, as the product in linear_cross_entropy is
    kernels = {name.removeprefix("linear_").rstrip("_") for name in {*mindspeed_kernels.__all__} - composed}
    of_cpu, _ = result.stdout.split("operators on an NPU")
    for word in ("torch", "cpu capability", "lowered from", *kernels):
        assert word in of_cpu or _C.detected_cpu_capability() == "default", result.stdout
