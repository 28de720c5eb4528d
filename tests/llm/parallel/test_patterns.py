"""Module name patterns."""

import pytest
from torch import nn

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.parallel.patterns import match_modules, matches


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.{*}", "model.layers.11", True),
        ("model.layers.{*}", "model.layers.1.mlp", False),
        ("model.layers.{*}", "model.layers.x", False),
        ("model.layers.{2-11}.mlp", "model.layers.7.mlp", True),
        ("model.layers.{2-11}.mlp", "model.layers.1.mlp", False),
        ("model.layers.{3}", "model.layers.3", True),
        ("*.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("model.*.0", "model.layers.0", True),
        ("model.*", "model.layers.0", False),
        ("lm_head", "lm_head", True),
        ("lm?head", "lm_head", True),
        ("model+layers", "modelllayers", False),
    ],
)
def test_matches(pattern, name, expected):
    assert matches(name, pattern) is expected


def test_a_pattern_without_any_module_is_an_error():
    with pytest.raises(ConfigError, match=r"parallel.fsdp_modules: no module matches 'layer.\{\*\}'"):
        match_modules(nn.Sequential(nn.Linear(1, 1)), ["layer.{*}"], "fsdp_modules")


def test_matches_keep_the_order_of_the_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    assert [name for name, _ in match_modules(model, ["2", "0"], "fsdp_modules")] == ["0", "2"]
