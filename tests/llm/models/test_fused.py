"""Which attention a run has: the configuration, the device and the proof decide."""

from __future__ import annotations

import pytest
import torch

from mindspeed_llm.config import Config
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.fused import fuse_operators
from tests.llm.models.architectures import make_model, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


def attention(folder, *, device: str = "cpu", model: dict | None = None, **sections: dict) -> str:
    """The implementation of the model after :func:`fuse_operators`."""
    sections["optimization"] = {"use_fused_rmsnorm": False, "use_fused_swiglu": False} | sections.get(
        "optimization", {}
    )
    config = Config.model_validate(
        {
            "model": {"model_name_or_path": str(folder), **(model or {})},
            "data": {"dataset": "unused"},
            "training": {"stage": "sft", "output_dir": "unused"},
            **sections,
        }
    )
    built = ModelFactory(config.model).create()
    fuse_operators(built, config, torch.device(device))
    return built.config._attn_implementation


def test_a_cpu_has_fused_attention(folder, capsys):
    assert attention(folder) == "mindspeed"
    assert "mindspeed instead of sdpa" in capsys.readouterr().out


def test_it_can_be_switched_off(folder):
    assert attention(folder, optimization={"use_flash_attn": False}) == "sdpa"
    assert attention(folder, model={"attn_implementation": "eager"}) == "eager"


def test_other_devices_keep_their_own_unless_asked(folder):
    assert attention(folder, device="cuda") == "sdpa"
    assert attention(folder, device="cuda", model={"attn_implementation": "mindspeed"}) == "mindspeed"


def test_context_parallelism_brings_its_own(folder):
    assert attention(folder, parallel={"cp_size": 2}) == "sdpa"


def test_a_model_that_cannot_have_it(tmp_path):
    model = make_model("llama")
    model.config.attention_dropout = 0.1
    folder = save(model, tmp_path)
    assert attention(folder) == "sdpa"
    with pytest.raises(ConfigError, match=r"model.attn_implementation: mindspeed .*attention_dropout is 0.1"):
        attention(folder, model={"attn_implementation": "mindspeed"})
