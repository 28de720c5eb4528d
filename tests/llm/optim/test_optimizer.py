"""Parameter groups, and the optimizer against the formula."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.optim.optimizer import OptimizerFactory, parameter_groups


def tiny_model() -> torch.nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        attention_bias=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def test_norms_and_biases_do_not_decay_and_nothing_is_lost():
    model = tiny_model()
    groups = parameter_groups(model, 0.1)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        exempt = "norm" in name or name.endswith("bias")
        assert decay.pop(id(parameter)) == (0.0 if exempt else 0.1), name
    assert not decay


def test_stacked_expert_biases_do_not_decay_and_frozen_parameters_are_left_out():
    module = torch.nn.Module()
    module.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(4, 8))
    module.weight = torch.nn.Parameter(torch.zeros(4, 8))
    module.frozen = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    decayed, exempt = parameter_groups(module, 0.1)
    assert decayed["params"] == [module.weight]
    assert exempt["params"] == [module.gate_up_proj_bias]


def test_adamw_is_the_formula():
    module = torch.nn.Linear(3, 2).double()
    before = module.weight.detach().clone()
    options = TrainingConfig(output_dir="unused", lr=0.1, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9)
    optimizer = OptimizerFactory(options).create(module)
    module.weight.grad = gradient = torch.randn_like(module.weight)
    module.bias.grad = torch.zeros_like(module.bias)
    optimizer.step()
    mean, square = 0.2 * gradient / (1 - 0.8), 0.1 * gradient**2 / (1 - 0.9)
    expected = before * (1 - 0.1 * 0.2) - 0.1 * mean / (square.sqrt() + options.adam_epsilon)
    torch.testing.assert_close(module.weight.detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "torch"])
def test_steps_with_clipping_equal_torch_on_scaled_gradients(dtype):
    """Also for a parameter whose first gradient comes later, and for one that has none at all."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)).to(dtype) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    options = TrainingConfig(output_dir="unused", lr=0.1, weight_decay=0.2)
    optimizer = OptimizerFactory(options).create(ours)
    expected = torch.optim.AdamW(parameter_groups(theirs, 0.2), lr=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        for index, (mine, their) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            if index == 3 or (index == 2 and step == 0):
                continue
            gradient = torch.randn_like(mine)
            mine.grad, their.grad = gradient.clone(), gradient * 0.3
        optimizer.step(gradient_scale=0.3)
        expected.step()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-6, atol=1e-6)
        state = optimizer.state[mine]
        assert state.keys() == expected.state[their].keys()
        for key, value in expected.state[their].items():
            torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-7)
    assert [len(optimizer.state[p]) for p in ours.parameters()] == [3, 3, 3, 0]
