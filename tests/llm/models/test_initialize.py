"""Random weights: the class's own distribution, the same numbers for every sharding (on ranks: loading_worker.py)."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mindspeed_llm.errors import UserError
from mindspeed_llm.models.initialize import initialize_weights
from mindspeed_llm.models.skeleton import parameters_on_meta
from tests.llm.models.architectures import ARCHITECTURES, make_config


def initialized(name: str, seed: int = 0):
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    initialize_weights(model, seed)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_drawn_as_its_class_draws_it(name):
    """Constants are the same as transformers', the spread of what is random is as wide."""
    torch.manual_seed(0)
    expected = dict(AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32).named_parameters())
    for key, parameter in initialized(name).named_parameters():
        assert torch.isfinite(parameter).all(), key
        if parameter.numel() == 1 or expected[key].std() == 0:
            assert torch.equal(parameter, expected[key]), key
        elif parameter.numel() >= 256:
            assert (parameter.std() / expected[key].std()).item() == pytest.approx(1, rel=0.35), key


def test_the_seed_and_nothing_else_decides():
    state = torch.get_rng_state()
    first = initialized("qwen3_moe", seed=3).state_dict()
    torch.rand(7)
    again, other = initialized("qwen3_moe", seed=3).state_dict(), initialized("qwen3_moe", seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    torch.set_rng_state(state)
    initialized("llama")
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_not_copies_of_each_other():
    layers = initialized("llama").model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[0].mlp.gate_proj.weight)


def test_tied_weights_stay_tied():
    model = initialized("llama_tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight


class Forgetful(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.zeros(3))
        self.post_init()


def test_a_parameter_that_is_left_out_is_named():
    with parameters_on_meta():
        model = Forgetful(make_config("llama"))
    with pytest.raises(UserError, match=r"Forgetful\._init_weights does not initialise scale"):
        initialize_weights(model, 0)
