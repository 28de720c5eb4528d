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
from torch.utils import _pytree as pytree

import mindspeed_kernels as kernels
from tests.ascend.device.device import Device, implementation


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def heads(*shape: int) -> Tensor:
    return rand(shape[0], shape[2], shape[1], shape[3]).detach().transpose(1, 2).requires_grad_()


def angles(*shape: int) -> Tensor:
    return rand(*shape, grad=False).sin()


def attend(**options: Any) -> Callable[..., Any]:
    return lambda *tensors, **more: kernels.flash_attention(*tensors, **options, **more)


def seqlens(*ends: int) -> Tensor:
    return torch.tensor(ends)


X = rand(3, 5, 8)
QKV = (rand(2, 5, 4, 8), rand(2, 7, 2, 8), rand(2, 7, 2, 6))
PACKED = tuple(t.detach().flatten(0, 1).requires_grad_() for t in QKV)
ENDS = {"cu_seqlens_q": seqlens(0, 3, 3, 10), "cu_seqlens_k": seqlens(0, 6, 6, 14)}
INDEX = torch.tensor([[0, 2], [1, 0], [5, 2], [2, -1]])
OFFSETS = torch.tensor([2, 2, 4], dtype=torch.int32)
SOURCE = kernels.moe_permute(torch.zeros(4, 1), INDEX, 3)[2]

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
    "swiglu, two tensors": (kernels.swiglu, (X, rand(3, 5, 8)), {}, set()),
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


def outputs_and_gradients(function: Callable[..., Any], arguments: Any, device: str) -> list[Tensor]:
    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(Tensor, copy, arguments)
    outputs = [t for t in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor)]
    floating = [t for t in outputs if t.is_floating_point()]
    torch.autograd.backward(
        floating, [torch.linspace(-1, 1, t.numel()).view(t.shape).to(device, t.dtype) for t in floating]
    )
    grads = [t.grad for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    assert all(t.device.type == device for t in (*outputs, *grads))
    return [t.detach().cpu() for t in (*outputs, *grads)]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu(device: Device, name: str):
    function, args, kwargs, called = CASES[name]
    device.called.clear()
    with implementation(""):
        found = outputs_and_gradients(function, (args, kwargs), "npu")
    expected = outputs_and_gradients(function, (args, kwargs), "cpu")
    for t, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(t, reference, rtol=1e-5, atol=1e-5)
    assert {name for name in device.called if name.startswith("npu_")} == called


def test_gradient_through_the_logsumexp(device: Device):
    """torch_npu's has none: the definition's."""
    with implementation(""):
        found = outputs_and_gradients(attend(return_logsumexp=True), (QKV, {}), "npu")
    expected = outputs_and_gradients(attend(return_logsumexp=True), (QKV, {}), "cpu")
    for t, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(t, reference, rtol=1e-5, atol=1e-5)


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
