"""Expert loads, balancing through the routers' bias, and routing that is fixed."""

from __future__ import annotations

import pytest
import torch
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.parallel.recompute import apply_recompute
from mindspeed_llm.parallel.structure import expert_modules
from mindspeed_llm.routing import BiasBalancing, ExpertLoad, fix_routing, worst_load
from tests.llm.parallel.cases import VOCAB, build_model


def batch(rows: int = 4, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def routers_choices(model: PreTrainedModel) -> list[torch.Tensor]:
    """What the routers return in every forward pass from now on: [tokens, top_k], layer after layer."""
    choices: list[torch.Tensor] = []
    for experts in expert_modules(model):
        experts.register_forward_pre_hook(lambda module, args: choices.append(args[1]))
    return choices


def counted(choices: list[torch.Tensor]) -> list[int]:
    return [int((choice == expert).sum()) for choice in choices for expert in range(4)]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_counts_are_those_of_the_routers(name):
    model = build_model(name)
    load = ExpertLoad(model)
    choices = routers_choices(model)
    model(batch(), use_cache=False)
    first = load.take()
    assert first == counted(choices)
    assert sum(first) == len(expert_modules(model)) * 4 * 24 * 2
    assert load.take() == [0] * len(first)
    model(batch(seed=1), use_cache=False)
    model(batch(seed=2), use_cache=False)
    total = torch.tensor(counted(choices)).view(3, -1)
    assert load.take() == (total[1] + total[2]).tolist()


def test_padding_and_evaluation_do_not_count():
    model = build_model("qwen3_moe")
    load = ExpertLoad(model)
    choices = routers_choices(model)
    mask = torch.arange(24) < torch.tensor([24, 3, 10, 1])[:, None]
    model(batch(), attention_mask=mask.long(), use_cache=False)
    assert load.take() == counted([choice[mask.flatten()] for choice in choices])
    model.eval()(batch())
    assert sum(load.take()) == 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_routes_alike_and_counts_nothing_twice(mode):
    """Peers' report E18."""
    counts, gradients = [], []
    for recompute in (False, True):
        model = build_model("qwen3_moe")
        apply_recompute(model, ParallelConfig(recompute=recompute, recompute_mode=mode))
        load = ExpertLoad(model)
        choices = routers_choices(model)
        model(batch(), use_cache=False).logits.logsumexp(-1).sum().backward()
        if recompute:
            forward, again = choices[:2], choices[2:][::-1]
            assert all(torch.equal(a, b) for a, b in zip(forward, again, strict=True))
        counts.append(load.take())
        gradients.append([p.grad for p in model.parameters()])
    assert counts[0] == counts[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_worst_load_is_in_multiples_of_the_mean():
    loads = [torch.tensor([2.0, 2.0, 2.0, 2.0]), torch.tensor([0.0, 6.0, 1.0, 1.0]), torch.zeros(4)]
    assert worst_load(loads) == 3.0


def test_the_bias_follows_the_load():
    model = build_model("deepseek_v3")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    before = bias.clone()
    BiasBalancing(model, 0.5).update([torch.tensor([10.0, 0.0, 5.0, 5.0])])
    torch.testing.assert_close(bias - before, torch.tensor([-0.5, 0.5, 0.0, 0.0]))


def test_a_bias_that_is_a_parameter_in_another_module_is_found():
    config = Ernie4_5_MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0,
    )  # fmt: skip
    model = Ernie4_5_MoeForCausalLM(config)
    assert len(expert_modules(model)) == 2
    BiasBalancing(model, 0.25).update([torch.tensor([1.0, 1.0, 4.0, 2.0])] * 2)
    biases = [value for name, value in model.named_parameters() if name.endswith("e_score_correction_bias")]
    assert [bias.tolist() for bias in biases] == [[[0.25, 0.25, -0.25, 0.0]]] * 2


def test_balancing_spreads_tokens_that_all_went_to_two_experts():
    model = build_model("deepseek_v3")
    model.model.layers[1].mlp.gate.e_score_correction_bias[:] = torch.tensor([1.0, 1.0, 0.0, 0.0])  # scores are below 1
    load = ExpertLoad(model)
    balancing = BiasBalancing(model, 0.04)
    course = []
    for step in range(40):
        model(batch(8, seed=step), use_cache=False)
        loads = load.by_layer(load.take())
        course.append(worst_load(loads))
        balancing.update(loads)
    assert course[0] == 2.0  # two of four experts got everything
    assert max(course[-5:]) < 1.4


def test_a_model_without_a_bias_cannot_be_balanced_by_it():
    with pytest.raises(ConfigError, match="the routers of Qwen3MoeForCausalLM have no e_score_correction_bias"):
        BiasBalancing(build_model("qwen3_moe"), 0.1)


def test_fixed_routing_gives_all_experts_the_same():
    model = build_model("lopsided")
    fix_routing(model)
    load = ExpertLoad(model)
    output = model(batch(), use_cache=False).logits
    assert load.take() == [4 * 24 * 2 // 4] * 4
    assert torch.isfinite(output).all()


def test_a_dense_model_has_no_routing_to_fix():
    with pytest.raises(ConfigError, match=r"optimization.fix_router: Qwen3ForCausalLM has no experts"):
        fix_routing(build_model("qwen3"))


def test_a_dense_model_has_no_load():
    load = ExpertLoad(build_model("qwen3"))
    assert load.take() == []
    assert load.by_layer([]) == []
