"""A layer of experts, against transformers' own implementations."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import mindspeed_kernels
from benchmarks.case import EAGER, OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, hidden, intermediate, experts, top_k in ((4096, 1024, 512, 8, 2), (2048, 2048, 768, 64, 8)):
            if dtype == torch.float32 and experts > 8:
                continue
            layers = Work(flops=2 * tokens * top_k * 3 * hidden * intermediate)
            yield Case(
                "fused_experts",
                f"{tokens}x{hidden}, I {intermediate}, E {experts}, top {top_k}",
                dtype,
                forward=layers,
                backward=layers + layers,
                build=partial(problem, tokens, hidden, intermediate, experts, top_k, dtype),
            )


def problem(tokens: int, hidden: int, intermediate: int, experts: int, top_k: int, dtype: torch.dtype) -> Problem:
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weights, index = torch.randn(tokens, experts).softmax(-1).topk(top_k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype).requires_grad_()
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=top_k
    )
    module = Qwen3MoeExperts(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def theirs(implementation: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module.config._experts_implementation = implementation
        return module(x, index, weights)

    def ours(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return mindspeed_kernels.fused_experts(x, index, weights, module.gate_up_proj, module.down_proj)

    contestants = {"HF grouped_mm": partial(theirs, "grouped_mm"), OURS: ours}
    if experts <= 8:  # with 64 it takes many times as long as the others
        contestants[EAGER] = partial(theirs, "eager")
    return Problem((x, index, weights), [x, weights, *module.parameters()], contestants, layers=2)
