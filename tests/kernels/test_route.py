"""route against the routers of transformers; ties, dtypes, gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from mindspeed_kernels import route


def deepseek_router(groups: int, top_k_groups: int) -> torch.nn.Module:
    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=12, num_experts_per_tok=3, n_group=groups, topk_group=top_k_groups
    )
    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.copy_(0.3 * torch.randn(12))
    return router


@pytest.mark.parametrize(("groups", "top_k_groups"), [(1, 1), (4, 2), (3, 3), (2, 1)])
def test_deepseek_v3(groups: int, top_k_groups: int) -> None:
    torch.manual_seed(0)
    router = deepseek_router(groups, top_k_groups)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 16)
    _, *expected = router(x)
    weights, index = route(
        x @ router.weight.T,
        3,
        scoring="sigmoid",
        expert_bias=router.e_score_correction_bias,
        num_groups=groups,
        top_k_groups=top_k_groups,
        scale=router.routed_scaling_factor,
    )
    assert_same_choice(weights, index, *expected)


@pytest.mark.parametrize("normalize", [True, False])
def test_qwen3_moe(normalize: bool) -> None:
    torch.manual_seed(1)
    config = Qwen3MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize)
    router = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    logits, *expected = router(torch.randn(50, 16))
    assert_same_choice(*route(logits, 3, normalize=normalize), *expected)


def test_mixtral() -> None:
    torch.manual_seed(2)
    router = MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2))
    torch.nn.init.normal_(router.weight)
    logits, *expected = router(torch.randn(50, 16))
    assert_same_choice(*route(logits, 2), *expected)


def assert_same_choice(weights, index, expected_weights, expected_index) -> None:
    """transformers leaves the order open."""
    order, expected_order = index.argsort(-1), expected_index.argsort(-1)
    assert torch.equal(index.gather(-1, order), expected_index.gather(-1, expected_order))
    torch.testing.assert_close(weights.gather(-1, order), expected_weights.gather(-1, expected_order))


def test_equal_scores_go_to_the_lower_experts() -> None:
    _, index = route(torch.zeros(3, 64), 8)
    assert torch.equal(index, torch.arange(8).expand(3, 8))
    _, index = route(torch.zeros(3, 64), 8, num_groups=8, top_k_groups=2)
    assert torch.equal(index, torch.arange(8).expand(3, 8))


def test_recomputation_chooses_again_what_it_chose() -> None:
    chosen = []

    def forward(logits: torch.Tensor) -> torch.Tensor:
        weights, index = route(logits, 2)
        chosen.append(index)
        return weights

    logits = torch.ones(5, 16, requires_grad=True)
    with set_checkpoint_early_stop(False):
        checkpoint(forward, logits, use_reentrant=False).square().sum().backward()
    assert len(chosen) == 2
    assert torch.equal(*chosen)


def test_half_precision_logits_are_scored_in_float32() -> None:
    """In bfloat16 the softmax of these would be equal, and the lower experts chosen."""
    logits = torch.tensor([[0.0, 0.001, 0.002, 0.003]], dtype=torch.bfloat16)
    assert logits.softmax(-1).unique().numel() < 4
    weights, index = route(logits, 2)
    assert index.tolist() == [[3, 2]]
    assert weights.dtype == torch.float32


def test_bias_chooses_without_weighing() -> None:
    logits = torch.randn(20, 6, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, 9.0], requires_grad=True)
    weights, index = route(logits, 2, scoring="sigmoid", expert_bias=bias, normalize=False)
    assert set(index.flatten().tolist()) == {4, 5}
    assert torch.equal(weights, logits.sigmoid().gather(-1, index))
    weights.sum().backward()
    assert bias.grad is None
    assert logits.grad[:, 4:].all()
    assert not logits.grad[:, :4].any()


def test_gradients() -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"scoring": "sigmoid"}, {"normalize": False}, {"num_groups": 3, "top_k_groups": 2}):
        assert torch.autograd.gradcheck(lambda x, options=options: route(x, 2, **options)[0], logits)


def test_compiles_without_graph_break() -> None:
    logits = torch.randn(5, 8)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        compiled(logits, 2, num_groups=2, top_k_groups=1), route(logits, 2, num_groups=2, top_k_groups=1), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_no_tokens() -> None:
    weights, index = route(torch.empty(0, 8), 2, num_groups=2, top_k_groups=1)
    assert weights.shape == index.shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"top_k": 9}, "top_k 9 is not in [1, 8]"),
        ({"top_k": 5, "num_groups": 2}, "top_k 5 is not in [1, 4]"),
        ({"top_k": 1, "num_groups": 3}, "8 experts cannot form 3 groups"),
        ({"top_k": 1, "num_groups": 2, "top_k_groups": 3}, "of which 3 are chosen"),
    ],
    ids=str,
)
def test_errors_name_the_numbers(options, named: str) -> None:
    with pytest.raises(ValueError, match="route:") as error:
        route(torch.zeros(3, 8), **options)
    assert named in str(error.value)
