"""Recomputation: what is run again in backward and what is not; the gradients are the same to the last bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_kernels import hf
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.recompute import apply_recompute
from tests.llm.parallel.cases import VOCAB, build_model


class Runs(TorchDispatchMode):
    """How often operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.of[func.name()] += 1
        return func(*args, **(kwargs or {}))


def train(name: str, fused: bool, **parallel: Any) -> tuple[Counter[str], list[torch.Tensor | None]]:
    """Operators that a forward and backward pass run, and its gradients."""
    model = build_model(name)
    if fused:
        assert hf.use_attention(model).switched
        hf.apply(model, ops=["experts", "linear_attention"])
    apply_recompute(model, ParallelConfig(**parallel))
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with Runs() as runs:
        model(ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    return runs.of, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "fused", "kept"),
    [
        ("qwen3_moe", True, {"mindspeed::flash_attention_forward": 2, "mindspeed::fused_experts": 2}),
        ("qwen3_moe", False, {"aten::_scaled_dot_product_flash_attention_for_cpu": 2}),
        ("qwen3_next", True, {"mindspeed::gated_delta_rule": 1}),
    ],
)
def test_selective_runs_attention_and_experts_once(name, fused, kept):
    once, expected = train(name, fused)
    twice, *full = train(name, fused, recompute=True)
    selective, *kept_gradients = train(name, fused, recompute=True, recompute_mode="selective")
    for operator, layers in kept.items():
        assert once[operator] >= layers
        assert twice[operator] - once[operator] == layers, operator
        assert selective[operator] == once[operator], operator
    assert selective["aten::rsqrt"] == twice["aten::rsqrt"] > once["aten::rsqrt"]  # norms are run again
    for (gradients,) in (full, kept_gradients):
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_selective_refuses_what_was_changed_in_place():
    """A model that writes into what its attention returned would get back what it wrote."""
    model = build_model("qwen3")
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: args[0].mul_(2))
    apply_recompute(model, ParallelConfig(recompute=True, recompute_mode="selective"))
    loss = model(torch.arange(16)[None], use_cache=False).logits.sum()
    with pytest.raises(RuntimeError, match="mutated"):
        loss.backward()
