"""The operators as PyTorch sees them: schemas, tracing rules, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mindspeed_kernels as kernels

OPS = torch.ops.mindspeed


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def heads(*shape: int, **options) -> Tensor:
    """[batch, heads, seq, head_dim] as transformers passes it."""
    return rand(shape[0], shape[2], shape[1], shape[3], **options).detach().transpose(1, 2).requires_grad_()


HALF = torch.bfloat16
QKV = (rand(2, 5, 4, 8), rand(2, 6, 2, 8), rand(2, 6, 2, 12))
PACKED = tuple(t.detach().flatten(0, 1).requires_grad_() for t in QKV)
ENDS = (torch.tensor([0, 3, 10]), torch.tensor([0, 6, 12]))
ATTENDED = (rand(2, 5, 4, 12), rand(2, 4, 5), *QKV, rand(2, 5, 4, 12), rand(2, 4, 5))
ROTATED = (heads(2, 4, 5, 8), heads(2, 2, 5, 8), rand(1, 5, 6, grad=False), rand(1, 5, 6, grad=False))
CONVOLVED = (rand(2, 5, 8), rand(2, 5, 8), rand(8, 4))
REMEMBERED = (rand(2, 5, 2, 6), rand(2, 5, 2, 6), rand(2, 5, 4, 3), rand(2, 5, 4), rand(2, 5, 4))
PER_CHANNEL = (*REMEMBERED[:3], rand(2, 5, 4, 6), REMEMBERED[4])
OFFSETS = torch.tensor([2, 2, 4], dtype=torch.int32)
SOURCE = torch.tensor([1, 3, 0, -1])  # two tokens, top 2
ROUTED = (rand(5, 8), torch.tensor([[0, 2], [1, 0], [5, 2], [0, 1], [2, 1]]), rand(5, 2))
EXPERTS = (*ROUTED, rand(3, 12, 8), None, rand(3, 8, 6), None, False, False, 1.0, float("inf"), 0.0)
GPT_OSS_EXPERTS = (*ROUTED, rand(3, 8, 12), rand(3, 12), rand(3, 6, 8), rand(3, 8), True, True, 1.7, 7.0, 1.0)
TARGETS = torch.tensor([2, -100, 6])
LOSS = (TARGETS, -100, 5.0, 0.1, 0.01)
CALLS = {
    "causal_conv1d": (OPS.causal_conv1d, (rand(2, 5, 8), rand(8, 4), rand(8), True, None)),
    "causal_conv1d, packed": (OPS.causal_conv1d, (rand(2, 5, 8), rand(8, 4), None, False, torch.tensor([1, 4, 9]))),
    "causal_conv1d_backward": (OPS.causal_conv1d_backward, (*CONVOLVED, rand(8), True, None)),
    "causal_conv1d_backward without bias": (
        OPS.causal_conv1d_backward,
        (*CONVOLVED, None, False, torch.tensor([1, 4, 9])),
    ),
    "flash_attention_forward": (OPS.flash_attention_forward, (*QKV, rand(4), None, None, None, 0.3, True, 3, 2.0)),
    "flash_attention_forward, packed": (
        OPS.flash_attention_forward,
        (*PACKED, None, *ENDS, torch.tensor([1, -1]), 0.3, False, None, None),
    ),
    "flash_attention_backward": (
        OPS.flash_attention_backward,
        (*ATTENDED, rand(4, dtype=HALF), None, None, None, 0.3, True, 3, 2.0),
    ),
    "flash_attention_backward, packed": (
        OPS.flash_attention_backward,
        (rand(10, 4, 12), None, *PACKED, rand(10, 4, 12), rand(4, 10), None, *ENDS, None, 0.3, True, None, None),
    ),
    "fused_experts": (OPS.fused_experts, EXPERTS),
    "fused_experts with biases": (OPS.fused_experts, GPT_OSS_EXPERTS),
    "fused_experts_backward": (OPS.fused_experts_backward, (rand(5, 8), rand(10, 12), *EXPERTS, True)),
    "fused_experts_backward with biases": (
        OPS.fused_experts_backward,
        (rand(5, 8), rand(10, 12), *GPT_OSS_EXPERTS, True),
    ),
    "fused_experts_backward of frozen experts": (
        OPS.fused_experts_backward,
        (rand(5, 8), rand(10, 12), *GPT_OSS_EXPERTS, False),
    ),
    "gated_delta_rule": (OPS.gated_delta_rule, (*REMEMBERED, None, None, 0.3, True, False)),
    "gated_delta_rule, packed": (
        OPS.gated_delta_rule,
        (*REMEMBERED, rand(3, 4, 6, 3), torch.tensor([0, 1, 1, 10]), 0.3, False, True),
    ),
    "gated_delta_rule, per channel": (OPS.gated_delta_rule, (*PER_CHANNEL, None, None, 0.3, True, False)),
    "gated_delta_rule_backward, per channel": (
        OPS.gated_delta_rule_backward,
        (rand(2, 5, 4, 3), None, *PER_CHANNEL, None, None, rand(0, 4, 6, 3), 0.3, True),
    ),
    "gated_delta_rule_backward": (
        OPS.gated_delta_rule_backward,
        (rand(2, 5, 4, 3), None, *REMEMBERED, None, None, rand(0, 4, 6, 3), 0.3, True),
    ),
    "gated_delta_rule_backward, packed": (
        OPS.gated_delta_rule_backward,
        (
            rand(2, 5, 4, 3),
            rand(3, 4, 6, 3),
            *REMEMBERED,
            rand(3, 4, 6, 3),
            torch.tensor([0, 1, 1, 10]),
            rand(0, 4, 6, 3),
            0.3,
            False,
        ),
    ),
    "grouped_gemm": (OPS.grouped_gemm, (rand(5, 8), rand(3, 6, 8), OFFSETS, False)),
    "grouped_gemm, transposed": (OPS.grouped_gemm, (rand(5, 8), rand(3, 8, 6), OFFSETS, True)),
    "grouped_gemm_weight_gradient": (OPS.grouped_gemm_weight_gradient, (rand(5, 6), rand(5, 8), OFFSETS, False)),
    "moe_permute": (OPS.moe_permute, (rand(3, 8), torch.tensor([[0, 2], [1, 0], [5, 2]]), 3)),
    "moe_unpermute": (OPS.moe_unpermute, (rand(4, 8), SOURCE, rand(2, 2), 2)),
    "moe_unpermute without weights": (OPS.moe_unpermute, (rand(4, 8), SOURCE, None, 2)),
    "moe_unpermute_backward": (OPS.moe_unpermute_backward, (rand(2, 8), rand(4, 8), SOURCE, rand(2, 2), 2)),
    "moe_unpermute_backward without weights": (OPS.moe_unpermute_backward, (rand(2, 8), None, SOURCE, None, 2)),
    "rms_norm": (OPS.rms_norm, (rand(2, 3, 8), rand(8), 1e-6, False, True)),
    "rms_norm without weight": (OPS.rms_norm, (rand(2, 3, 8), None, 1e-6, False, True)),
    "rms_norm, wider weight": (OPS.rms_norm, (rand(2, 3, 8, dtype=HALF), rand(8), 1e-6, True, True)),
    "add_rms_norm": (OPS.add_rms_norm, (rand(2, 3, 8), rand(2, 3, 8), rand(8), 1e-6, False, False)),
    "rms_norm_backward": (
        OPS.rms_norm_backward,
        (rand(2, 8), rand(2, 8), rand(2, 8), rand(8), torch.rand(2), False, True, True),
    ),
    "rms_norm_backward without weight": (
        OPS.rms_norm_backward,
        (rand(2, 8), None, rand(2, 8), None, torch.rand(2), False, True, False),
    ),
    "rms_norm_gated": (OPS.rms_norm_gated, (rand(2, 3, 8), rand(2, 3, 8), rand(8, dtype=HALF), 1e-6, False)),
    "rms_norm_gated_backward": (
        OPS.rms_norm_gated_backward,
        (rand(2, 8), rand(2, 8), rand(2, 8), rand(8), torch.rand(2), True),
    ),
    "rotary": (OPS.rotary, (*ROTATED, False)),
    "rotary, strided": (OPS.rotary, (rand(2, 4, 5, 16)[..., ::2], *ROTATED[1:], True)),
    "rotary_backward": (OPS.rotary_backward, (*ROTATED, True, torch.float32)),
    "rotary_backward into half precision": (OPS.rotary_backward, (*ROTATED, False, HALF)),
    "swiglu": (OPS.swiglu, (rand(2, 3, 8), rand(2, 3, 8))),
    "swiglu, concatenated": (OPS.swiglu, (rand(2, 3, 8), None)),
    "swiglu_backward": (OPS.swiglu_backward, (rand(3, 8), rand(3, 8), rand(3, 8))),
    "symmetric_product": (OPS.symmetric_product, (rand(2, 5, 8, grad=False), None, 1.0, 0.0)),
    "symmetric_product and a sum": (
        OPS.symmetric_product,
        (rand(2, 5, 8, grad=False), rand(2, 5, 5, grad=False), 2.0, 0.5),
    ),
    "adamw_step_": (
        OPS.adamw_step_,
        (*[[torch.rand(3), torch.rand(2, 4)] for _ in range(4)], [], [1, 2], 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, None),
    ),
    "adamw_step_ with copies": (
        OPS.adamw_step_,
        (*[[torch.rand(3)] for _ in range(4)], [torch.rand(3).to(HALF)], [1], 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 3),
    ),
    "cross_entropy_": (OPS.cross_entropy_, (torch.randn(3, 7), TARGETS, torch.rand(3), -100, None, 0.1, 0.01)),
    "cross_entropy_, losses only": (OPS.cross_entropy_, (torch.randn(3, 7), TARGETS, None, -100, 5.0, 0.0, 0.0)),
    "add_to_bfloat16_sum_": (
        OPS.add_to_bfloat16_sum_,
        (torch.rand(5).to(HALF), torch.zeros(5, dtype=torch.uint8), torch.rand(5).to(HALF), False),
    ),
    "linear_cross_entropy": (OPS.linear_cross_entropy, (rand(3, 4), rand(7, 4), None, *LOSS, 2)),
    "linear_cross_entropy_sum": (
        OPS.linear_cross_entropy_sum,
        (rand(3, 4), rand(7, 4), rand(7), *LOSS, 2, [True, True, True]),
    ),
    "linear_cross_entropy_sum, weight only": (
        OPS.linear_cross_entropy_sum,
        (rand(3, 4, grad=False), rand(7, 4), None, *LOSS, 2, [False, True, False]),
    ),
    "linear_cross_entropy_backward": (
        OPS.linear_cross_entropy_backward,
        (rand(3), rand(3, 4), rand(7, 4), rand(7), *LOSS, 2, [True, True, True]),
    ),
    "swiglu_backward, concatenated": (OPS.swiglu_backward, (rand(3, 4), rand(3, 8), None)),
}
NOT_DIFFERENTIABLE = (
    "causal_conv1d_backward",
    "flash_attention_backward",
    "fused_experts_backward",
    "gated_delta_rule_backward",
    "linear_cross_entropy_backward",
    "moe_unpermute_backward",
    "rms_norm_backward",
    "rms_norm_gated_backward",
    "swiglu_backward",
)


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call: str) -> None:
    operator, arguments = CALLS[call]
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not call.startswith(NOT_DIFFERENTIABLE):
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests)


def test_every_operator_is_checked() -> None:
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("mindspeed::")
    }
    assert registered == {operator._qualified_op_name.split("::")[1] for operator, _ in CALLS.values()}


class Block(torch.nn.Module):
    """All operators in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Parameter(torch.rand(32)), torch.nn.Parameter(torch.rand(32))
        self.filters = torch.nn.Parameter(torch.rand(32, 4))
        self.project = torch.nn.Linear(32, 64)
        self.router, self.experts = torch.nn.Linear(32, 3), torch.nn.Parameter(torch.rand(3, 32, 32) / 32)
        self.gate_up = torch.nn.Parameter(torch.rand(3, 64, 32) / 32)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = kernels.rms_norm(x, self.first)
        y = kernels.rms_norm_gated(y, kernels.causal_conv1d(y, self.filters, self.first), self.second)
        q = y.unflatten(-1, (4, 8))  # [batch, seq, heads, head_dim]
        q, k = (t.transpose(1, 2) for t in kernels.rotary(q.transpose(1, 2), q[..., :2, :].transpose(1, 2), cos, sin))
        attended = kernels.flash_attention(q, k, k.flip(-1), window=4)
        decay = -x.square()[..., :4]
        attended = attended + kernels.gated_delta_rule(q, q.sin(), attended, decay, decay.exp(), qk_l2norm=True)
        y, total = kernels.rms_norm(attended.flatten(-2), self.second, residual=x)
        total = total + kernels.swiglu(self.project(y))
        tokens = total.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        x_sorted, offsets, source = kernels.moe_permute(tokens, index, 3)
        y_sorted = kernels.grouped_gemm(x_sorted, self.experts, offsets)
        tokens = kernels.moe_unpermute(y_sorted, source, weights)
        tokens = kernels.fused_experts(tokens, index, weights, self.gate_up, self.experts)
        return total + tokens.view_as(total)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_break(backend: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    for seq in (5, 7) if dynamic else (5,):
        x = rand(2, seq, 32)
        angle = torch.randn(1, seq, 8)
        results = []
        for function in (block, compiled):
            y = function(x, angle.cos(), angle.sin())
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, *block.parameters()))))
        for actual, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_other_devices_run_the_reference() -> None:
    x = torch.empty(2, 3, 8, device="meta")
    assert kernels.rms_norm(x).shape == kernels.swiglu(x, x).shape == x.shape
    q, cos = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(1, 5, 8, device="meta")
    assert kernels.rotary(q, q, cos, cos)[0].shape == q.shape
    out, logsumexp = kernels.flash_attention(q, q, q, return_logsumexp=True)
    assert out.shape == q.shape
    assert logsumexp.shape == (2, 5, 4)
