"""The AscendC kernels as PyTorch's operators: host code, torch_npu's stream and queue, kernels on their CPU twin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import mindspeed_kernels as kernels
from mindspeed_kernels.npu import ascendc
from tests.ascend.device.calls import (
    ENDS,
    INDEX,
    OFFSETS,
    PACKED,
    QKV,
    SOURCE,
    X,
    angles,
    attend,
    heads,
    outputs_and_gradients,
    rand,
    seqlens,
)
from tests.ascend.device.device import Device, implementation

HALF = torch.bfloat16
RMS_NORM, ADD_RMS_NORM = {"rms_norm", "rms_norm_backward"}, {"add_rms_norm", "rms_norm_backward"}
SWIGLU, ROTARY = {"swiglu", "swiglu_backward"}, {"rotary", "rotary_backward"}
GEMM = {"grouped_gemm", "grouped_gemm_weight_gradient"}
ATTENTION = {"flash_attention_forward", "flash_attention_backward"}


def half(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().to(HALF).requires_grad_(t.requires_grad) for t in tensors)


CASES: dict[str, tuple[Callable[..., Any], tuple, dict[str, Any], set[str]]] = {
    "rms_norm": (kernels.rms_norm, (X, rand(8)), {}, RMS_NORM),
    "rms_norm, no weight": (kernels.rms_norm, (X,), {}, RMS_NORM),
    "rms_norm, 1 + weight": (
        kernels.rms_norm,
        half(X, rand(8)),
        {"zero_centered": True, "cast_order": "float32"},
        RMS_NORM,
    ),
    "rms_norm, wider weight": (kernels.rms_norm, (*half(X), rand(8)), {}, RMS_NORM),
    "rms_norm, residual": (kernels.rms_norm, (X, rand(8)), {"residual": rand(3, 5, 8)}, ADD_RMS_NORM),
    "swiglu": (kernels.swiglu, (X,), {}, SWIGLU),
    "swiglu, two tensors": (kernels.swiglu, half(X, rand(3, 5, 8)), {}, SWIGLU),
    "rotary": (
        kernels.rotary,
        (heads(2, 4, 5, 8), heads(2, 2, 5, 8), angles(1, 5, 8), angles(1, 5, 8)),
        {},
        ROTARY,
    ),
    "rotary, partial, wider angles": (
        kernels.rotary,
        (*half(rand(2, 4, 5, 8), rand(2, 2, 5, 8)), angles(2, 5, 6), angles(2, 5, 6)),
        {"interleaved": True},
        ROTARY,
    ),
    "grouped_gemm": (kernels.grouped_gemm, (*half(rand(5, 8), rand(3, 6, 8)), OFFSETS), {}, GEMM),
    "grouped_gemm, transposed": (
        kernels.grouped_gemm,
        (*half(rand(5, 8), rand(3, 8, 6)), OFFSETS),
        {"transposed": True},
        GEMM,
    ),
    "grouped_gemm, float32": (kernels.grouped_gemm, (rand(5, 8), rand(3, 6, 8), OFFSETS), {}, GEMM),
    "moe_permute": (kernels.moe_permute, (rand(4, 8), INDEX, 3), {}, {"moe_permute", "moe_unpermute"}),
    "moe_unpermute": (
        kernels.moe_unpermute,
        (*half(rand(8, 6)), SOURCE, rand(4, 2)),
        {},
        {"moe_unpermute", "moe_unpermute_backward"},
    ),
    "moe_unpermute, no weights": (
        kernels.moe_unpermute,
        (rand(8, 6), SOURCE),
        {"top_k": 2},
        {"moe_unpermute", "moe_unpermute_backward"},
    ),
}
CASES |= {
    f"flash_attention, {name}": (attend(**options), tensors, extra, ATTENTION)
    for name, options, tensors, extra in (
        ("causal", {"return_logsumexp": True}, half(*QKV), {}),
        ("window to both sides", {"window": 3, "causal": False}, half(*QKV), {}),
        ("offsets that hide", {}, half(*QKV), {"query_offsets": torch.tensor([1, -8])}),
        ("packed", {"return_logsumexp": True}, half(*PACKED), ENDS),
        ("sinks", {"return_logsumexp": True}, half(*QKV), {"sinks": rand(4)}),
        ("sinks of 16 bits, packed", {}, half(*PACKED), ENDS | {"sinks": rand(4, dtype=HALF)}),
        ("tokens outside", {}, half(*PACKED), {"cu_seqlens_q": seqlens(1, 4, 9), "cu_seqlens_k": seqlens(0, 6, 13)}),
        ("float32", {"return_logsumexp": True}, QKV, {"sinks": rand(4)}),
        ("softcap", {"return_logsumexp": True, "softcap": 2.0}, half(*QKV), {}),
        ("softcap, float32, packed", {"softcap": 2.0}, PACKED, ENDS),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu(device: Device, name: str):
    """Both round to the same types; sums are formed in another order, and exponentials by another library."""
    function, args, kwargs, called = CASES[name]
    device.called.clear()
    with implementation("ascendc"):
        found = outputs_and_gradients(function, (args, kwargs), "npu")
    expected = outputs_and_gradients(function, (args, kwargs), "cpu")
    lowest = max(
        torch.finfo(t.dtype).eps for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad
    )
    for t, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(t, reference, rtol=2 * lowest, atol=4 * lowest)
    assert set(device.called) == {f"ascendc {op}" for op in called}


def test_what_the_kernels_do_not_take_goes_on(device: Device):
    """Wide heads to torch_npu's, float64 to the definition."""
    device.called.clear()
    with implementation("ascendc"):
        kernels.flash_attention(*(torch.rand(1, 2, 1, 750, dtype=HALF, device="npu") for _ in range(3)))
        kernels.flash_attention(*(t.detach().double().to("npu") for t in QKV))
    assert device.called == ["npu_fusion_attention"]


FAULT = """
import os, torch, torch_npu
torch.ops.load_library(os.environ["MINDSPEED_ASCENDC_LIBRARY"])
y = torch.empty(2, 8, device="npu").copy_(torch.ones(2, 8))
source = torch.empty(2, dtype=torch.int64, device="npu").copy_(torch.tensor([0, 700]))
torch.ops.mindspeed.moe_unpermute_backward(y[:1], None, source, None, 2)
torch.npu.synchronize()
"""


def test_a_fault_of_a_kernel_is_an_error():
    """What the twin reports comes through: a row is read beyond its tensor. The device is of no use afterwards."""
    command = [sys.executable, "-W", "ignore", "-c", "import mindspeed_kernels" + FAULT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode != 0
    assert "moe_permute<float>" in run.stderr, run.stderr


def test_without_the_library_the_message_says_how_to_build_it(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setattr(ascendc, "LIBRARY", tmp_path / "_ascendc.so")
    with implementation("ascendc"), pytest.raises(ImportError, match=r"source CANN's set_env\.sh"):
        kernels.swiglu(torch.rand(2, 8, device="npu"))
