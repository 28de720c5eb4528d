"""Every call of torch_npu's operators fits the wheel's own schemas, and gives the shapes and types that ours have.

On the meta device: PyTorch checks the arguments against the schema, torch_npu's rule gives the shapes.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu  # noqa: F401
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_kernels.npu import vendor

HALF = torch.bfloat16
INTEGERS = (torch.int32, torch.int64)


def rand(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.rand(shape).to(dtype)


class Calls(TorchDispatchMode):
    """The operators of torch_npu that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "npu":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


X, WEIGHT, RSTD = rand(2, 3, 8), rand(8), rand(2, 3, dtype=torch.float32)
Q, KV = rand(2, 5, 4, 8), rand(2, 6, 2, 8)
LSE, PACKED_LSE = rand(2, 4, 5, dtype=torch.float32), rand(4, 10, dtype=torch.float32)
ENDS = (torch.tensor([0, 3, 10]), torch.tensor([0, 5, 12]))
PACKED = (Q.flatten(0, 1), KV.flatten(0, 1), KV.flatten(0, 1))
HEADS = (rand(2, 5, 4, 8).transpose(1, 2), rand(2, 5, 2, 8).transpose(1, 2))
ANGLES, PARTIAL = (
    (rand(1, 5, 8), rand(1, 5, 8)),
    (rand(2, 5, 6, dtype=torch.float32), rand(2, 5, 6, dtype=torch.float32)),
)
EXPERT_INDEX, SOURCE = torch.tensor([[0, 2], [1, 0], [5, 2]]), torch.tensor([1, 3, 0, -1])
OFFSETS = torch.tensor([2, 2, 4], dtype=torch.int32)

CALLS = [
    ("rms_norm", (X, WEIGHT, 1e-6, False, True), ["npu_rms_norm"]),
    ("rms_norm", (X, None, 1e-6, False, False), ["npu_rms_norm"]),
    ("rms_norm", (X.float(), WEIGHT.float(), 1e-6, True, True), ["npu_rms_norm"]),
    ("add_rms_norm", (X, X, WEIGHT, 1e-6, False, True), ["npu_add_rms_norm"]),
    ("rms_norm_backward", (X, None, X, WEIGHT, RSTD, False, True, True), ["npu_rms_norm_backward"]),
    ("rms_norm_backward", (X, X, X, None, RSTD, False, True, False), ["npu_rms_norm_backward"]),
    ("swiglu", (X, None), ["npu_swiglu"]),
    ("swiglu_backward", (rand(2, 3, 4), X, None), ["npu_swiglu_backward"]),
    ("swiglu", (X, X), ["npu_swiglu"]),
    ("swiglu_backward", (X, X, X), ["npu_swiglu_backward"]),
    ("rotary", (*HEADS, *ANGLES, False), ["npu_rotary_mul"] * 2),
    ("rotary", (*HEADS, *ANGLES, True), ["npu_rotary_mul"] * 2),
    ("rotary", (*HEADS, *PARTIAL, False), ["npu_rotary_mul"] * 2),
    ("rotary_backward", (*HEADS, *ANGLES, False, HALF), ["npu_rotary_mul"] * 2),
    ("rotary_backward", (*(h.float() for h in HEADS), *PARTIAL, False, HALF), ["npu_rotary_mul"] * 2),
    ("flash_attention_forward", (Q, KV, KV, None, None, None, None, 0.3, True, None, None), ["npu_fusion_attention"]),
    (
        "flash_attention_forward",
        (Q, KV, KV, rand(4), None, None, torch.tensor([1, 1]), 0.3, True, 3, None),
        ["npu_fusion_attention"],
    ),
    ("flash_attention_forward", (*PACKED, None, *ENDS, None, 0.3, True, None, None), ["npu_fusion_attention"]),
    (
        "flash_attention_backward",
        (Q, None, Q, KV, KV, Q, LSE, rand(4), None, None, None, 0.3, True, 3, None),
        ["npu_fusion_attention_grad"],
    ),
    (
        "flash_attention_backward",
        (PACKED[0], None, *PACKED, PACKED[0], PACKED_LSE, None, *ENDS, None, 0.3, False, None, None),
        ["npu_fusion_attention_grad"],
    ),
    ("grouped_gemm", (rand(5, 8), rand(3, 6, 8), OFFSETS, False), ["npu_grouped_matmul"]),
    ("grouped_gemm", (rand(5, 8), rand(3, 8, 6), OFFSETS, True), ["npu_grouped_matmul"]),
    ("grouped_gemm_weight_gradient", (rand(5, 6), rand(5, 8), OFFSETS, False), ["npu_grouped_matmul"]),
    ("grouped_gemm_weight_gradient", (rand(5, 6), rand(5, 8), OFFSETS, True), ["npu_grouped_matmul"]),
    ("moe_permute", (rand(3, 8), EXPERT_INDEX, 3), ["npu_moe_token_permute"]),
    ("moe_unpermute", (rand(4, 8), SOURCE, rand(2, 2), 2), ["npu_moe_token_unpermute"]),
    ("moe_unpermute", (rand(4, 8), SOURCE, None, 2), ["npu_moe_token_unpermute"]),
    ("moe_unpermute_backward", (rand(2, 8), rand(4, 8), SOURCE, rand(2, 2), 2), ["npu_moe_token_unpermute_grad_v2"]),
    ("moe_unpermute_backward", (rand(2, 8), None, SOURCE, None, 2), []),
]  # fmt: skip


def on_meta(op: str, arguments: tuple) -> tuple:
    """What a kernel is given on the device; attention's lengths stay on the host."""
    host = INTEGERS if op.startswith("flash_attention") else ()
    return pytree.tree_map_only(Tensor, lambda t: t if t.dtype in host else t.to("meta"), arguments)


@pytest.mark.parametrize(("op", "arguments", "called"), CALLS, ids=[f"{i} {op}" for i, (op, *_) in enumerate(CALLS)])
def test_calls_fit_the_schema_and_give_our_shapes(op: str, arguments: tuple, called: list[str]):
    implementation = vendor.TABLE[op]
    assert implementation.takes(*arguments)
    vendor.attention._hidden.cache_clear()
    with Calls() as calls:
        outputs = implementation.run(*on_meta(op, arguments))
    expected = getattr(torch.ops.mindspeed, op)(*on_meta(op, arguments))
    assert calls.names == called
    pairs = list(zip(*(o if isinstance(o, tuple) else (o,) for o in (outputs, expected)), strict=True))
    for output, ours in pairs:
        if op == "flash_attention_forward" and arguments[4] is not None and output.dtype == torch.float32:
            continue  # torch_npu's rule leaves out the tokens' dimension of packed statistics
        assert (output.shape, output.dtype) == (ours.shape, ours.dtype)


def test_every_operator_is_called():
    assert {op for op, *_ in CALLS} | {"route"} == set(vendor.TABLE)


def test_route():
    logits = torch.rand(5, 8)
    assert vendor.TABLE["route"].takes(logits, 3)
    index = vendor.TABLE["route"].run(logits.to("meta"), 3)
    assert (index.shape, index.dtype) == ((5, 3), torch.int64)


def test_a_wrong_argument_does_not_pass():
    """The check that the tests above rely on."""
    x = torch.empty(2, 8, device="meta")
    with pytest.raises(RuntimeError, match="npu_rms_norm"):
        torch.ops.npu.npu_rms_norm(x, x[0], "1e-6")
    with pytest.raises(RuntimeError, match="group_lists"):
        torch.ops.npu.npu_grouped_matmul([x], [x], group_lists=x)
