"""Parameter groups, and the optimizer against the formula."""

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
