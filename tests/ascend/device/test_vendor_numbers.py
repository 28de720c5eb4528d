"""The operators on an NPU by torch_npu's equal those on the CPU, with their gradients.

torch_npu's kernels are models of their documentation here: what is tested is how ours are put in its terms, and the
way through PyTorch's dispatcher and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mindspeed_kernels as kernels
from mindspeed_kernels.ops.flash_attention import backward, forward
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

CASES: dict[str, tuple[Callable[..., Any], tuple, dict[str, Any], set[str]]] = {
    "rms_norm": (kernels.rms_norm, (X, rand(8)), {}, {"npu_rms_norm", "npu_rms_norm_backward"}),
    "rms_norm, no weight": (kernels.rms_norm, (X,), {"eps": 1e-3}, {"npu_rms_norm", "npu_rms_norm_backward"}),
    "rms_norm, 1 + weight": (
        kernels.rms_norm,
        (X, rand(8)),
        {"zero_centered": True, "cast_order": "float32"},
        {"npu_rms_norm", "npu_rms_norm_backward"},
    ),
    "rms_norm, residual": (
        kernels.rms_norm,
        (X, rand(8)),
        {"residual": rand(3, 5, 8)},
        {"npu_add_rms_norm", "npu_rms_norm_backward"},
    ),
    "swiglu": (kernels.swiglu, (X,), {}, {"npu_swiglu", "npu_swiglu_backward"}),
    "swiglu, two tensors": (kernels.swiglu, (X, rand(3, 5, 8)), {}, {"npu_swiglu", "npu_swiglu_backward"}),
    "rotary": (
        kernels.rotary,
        (heads(2, 4, 5, 8), heads(2, 2, 5, 8), angles(1, 5, 8), angles(1, 5, 8)),
        {},
        {"npu_rotary_mul"},
    ),
    "rotary, partial, per sequence": (
        kernels.rotary,
        (rand(2, 4, 5, 8), rand(2, 2, 5, 8), angles(2, 5, 6), angles(2, 5, 6)),
        {},
        {"npu_rotary_mul"},
    ),
    "rotary, interleaved": (
        kernels.rotary,
        (heads(2, 4, 5, 8), heads(2, 2, 5, 8), angles(1, 5, 6), angles(1, 5, 6)),
        {"interleaved": True},
        {"npu_rotary_mul"},
    ),
    "grouped_gemm": (kernels.grouped_gemm, (rand(5, 8), rand(3, 6, 8), OFFSETS), {}, {"npu_grouped_matmul"}),
    "grouped_gemm, transposed": (
        kernels.grouped_gemm,
        (rand(5, 8), rand(3, 8, 6), OFFSETS),
        {"transposed": True},
        {"npu_grouped_matmul"},
    ),
    "moe_permute": (
        kernels.moe_permute,
        (rand(4, 8), INDEX, 3),
        {},
        {"npu_moe_token_permute", "npu_moe_token_unpermute"},
    ),
    "moe_unpermute": (
        kernels.moe_unpermute,
        (rand(8, 6), SOURCE, rand(4, 2)),
        {},
        {"npu_moe_token_unpermute", "npu_moe_token_unpermute_grad_v2"},
    ),
    "moe_unpermute, no weights": (
        kernels.moe_unpermute,
        (rand(8, 6), SOURCE),
        {"top_k": 2},
        {"npu_moe_token_unpermute"},
    ),
    "route": (kernels.route, (rand(6, 8), 3), {}, {"npu_moe_gating_top_k_softmax"}),
    "route, sigmoid": (kernels.route, (rand(6, 8), 3), {"scoring": "sigmoid"}, set()),
}  # fmt: skip
EXPERTS = {
    *("npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute", "npu_moe_token_unpermute_grad_v2"),
}
CASES |= {
    "fused_experts": (
        kernels.fused_experts,
        (rand(4, 8), INDEX, rand(4, 2), rand(3, 12, 8), rand(3, 8, 6)),
        {},
        EXPERTS | {"npu_swiglu", "npu_swiglu_backward"},
    ),
    "fused_experts, gpt-oss": (
        kernels.fused_experts,
        (rand(4, 8), INDEX, rand(4, 2), rand(3, 8, 12), rand(3, 6, 8)),
        {"gate_up_bias": rand(3, 12), "down_bias": rand(3, 8), "alpha": 1.7, "limit": 0.5, "up_offset": 1.0}
        | {"transposed": True, "interleaved": True},
        EXPERTS,
    ),
}
ATTENTION = {"npu_fusion_attention", "npu_fusion_attention_grad"}
CASES |= {
    f"flash_attention, {name}": (attend(**options), QKV, extra, called)
    for name, options, extra, called in (
        ("causal", {}, {}, ATTENTION),
        ("all", {"causal": False, "scale": 0.1}, {}, ATTENTION),
        ("window", {"window": 3}, {}, ATTENTION),
        ("window to both sides", {"window": 3, "causal": False}, {}, ATTENTION),
        ("sinks", {}, {"sinks": rand(4)}, ATTENTION),
        ("offsets of earlier keys", {}, {"query_offsets": torch.tensor([8, 6])}, ATTENTION),
        ("offsets that hide", {}, {"query_offsets": torch.tensor([1, -1])}, set()),
        ("softcap", {"softcap": 2.0}, {}, set()),
    )
}
CASES |= {
    "flash_attention, packed": (attend(), PACKED, ENDS, ATTENTION),
    "flash_attention, packed, window, sinks": (attend(window=2), PACKED, ENDS | {"sinks": rand(4)}, ATTENTION),
    "flash_attention, packed, tokens outside": (
        attend(),
        PACKED,
        {"cu_seqlens_q": seqlens(1, 4, 9), "cu_seqlens_k": seqlens(0, 6, 13)},
        set(),
    ),
}
# Neither torch_npu's nor ours: the definition, of PyTorch's operators.
DECAY, BETA = (t.detach().requires_grad_() for t in (-rand(2, 5, 4).abs(), rand(2, 5, 4).sigmoid()))
CASES |= {
    "causal_conv1d": (kernels.causal_conv1d, (rand(2, 5, 8), rand(8, 4), rand(8)), {}, set()),
    "gated_delta_rule": (
        kernels.gated_delta_rule,
        (rand(2, 5, 2, 8), rand(2, 5, 2, 8), rand(2, 5, 4, 6), DECAY, BETA),
        {"qk_l2norm": True},
        set(),
    ),
    "linear_cross_entropy": (kernels.linear_cross_entropy, (rand(6, 8), rand(9, 8), torch.arange(6)), {}, set()),
    "rms_norm_gated": (kernels.rms_norm_gated, (rand(3, 5, 8), rand(3, 5, 8), rand(8)), {}, set()),
}


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Both compute in float32, in another order: within a few roundings of the largest element."""
    eps = torch.finfo(torch.float32).eps
    for t, reference in zip(found, expected, strict=True):
        largest = max(map(abs, reference[reference.isfinite()].tolist()), default=0.0)
        torch.testing.assert_close(t, reference, rtol=0, atol=8 * eps * largest)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu(device: Device, name: str):
    function, args, kwargs, called = CASES[name]
    device.called.clear()
    with implementation(""):
        found = outputs_and_gradients(function, (args, kwargs), "npu")
    expected = outputs_and_gradients(function, (args, kwargs), "cpu")
    assert_all_close(found, expected)
    assert {name for name in device.called if name.startswith("npu_")} == called


def test_gradient_through_the_logsumexp(device: Device):
    """torch_npu's has none: the definition's."""
    with implementation(""):
        found = outputs_and_gradients(attend(return_logsumexp=True), (QKV, {}), "npu")
    expected = outputs_and_gradients(attend(return_logsumexp=True), (QKV, {}), "cpu")
    assert_all_close(found, expected)


def test_keys_in_two_calls(device: Device):
    """As a ring does: earlier keys, then a query's own, with the output and logsumexp of both."""
    q, k, v = (torch.randn(1, length, 2, 8) for length in (4, 8, 8))
    grad = torch.randn(1, 4, 2, 8)
    offsets = (torch.tensor([4]), torch.tensor([0]))

    def run(kind: str) -> list[Tensor]:
        moved_q, moved_grad = q.to(kind), grad.to(kind)
        parts = [(k[:, :4].to(kind), v[:, :4].to(kind)), (k[:, 4:].to(kind), v[:, 4:].to(kind))]
        outs, sums = zip(
            *(forward(moved_q, *p, query_offsets=o) for p, o in zip(parts, offsets, strict=True)), strict=True
        )
        total = torch.logaddexp(*sums)
        out = sum((s - total).exp().transpose(1, 2).unsqueeze(-1) * o for s, o in zip(sums, outs, strict=True))
        grads = [
            backward(moved_grad, None, moved_q, *p, out, total, query_offsets=o)[:3]
            for p, o in zip(parts, offsets, strict=True)
        ]
        return [t.cpu() for t in (out, total, *grads[0], *grads[1])]

    device.called.clear()
    with implementation(""):
        found = run("npu")
    assert_all_close(found, run("cpu"))
    assert set(device.called) == ATTENTION


def test_the_reference_is_chosen(device: Device):
    device.called.clear()
    with implementation("reference,swiglu=torch_npu"):
        kernels.rms_norm(torch.rand(2, 8, device="npu"))
        kernels.swiglu(torch.rand(2, 8, device="npu"))
    assert device.called == ["npu_swiglu"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_torch_npu_does_not_take_is_computed(device: Device, dtype: torch.dtype):
    """A float32 weight widens the result, which AscendC does too; float64 has no kernel."""
    weight = torch.rand(8, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.rand(2, 8).to(dtype)
    device.called.clear()
    with implementation(""):
        y = kernels.rms_norm(x.to("npu"), weight.to("npu"))
    expected = kernels.rms_norm(x, weight)
    torch.testing.assert_close(y.cpu(), expected)
    assert device.called == (["ascendc rms_norm"] if dtype == torch.bfloat16 else [])


def test_wrong_arguments_are_explained(device: Device):
    with implementation(""), pytest.raises(RuntimeError, match="weight must have shape"):
        kernels.rms_norm(torch.rand(2, 8, device="npu"), torch.rand(7, device="npu"))
