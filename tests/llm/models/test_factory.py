"""ModelFactory: what a folder, a registered class or a mistake leads to."""

import json
import sys

import pytest
import torch
from transformers import AutoTokenizer

from mindspeed_llm.config import ModelConfig
from mindspeed_llm.errors import ConfigError, DataError
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.models.registry import get_model_class, register
from tests.distributed import REPOSITORY
from tests.llm.models.architectures import make_model, save

TOKENIZER = REPOSITORY / "tests" / "data" / "oracles" / "tokenizer"
PLUGIN = '''
from transformers import LlamaConfig, LlamaForCausalLM
from mindspeed_llm.models.registry import register


class DoubledConfig(LlamaConfig):
    model_type = "doubled"


@register("doubled")
class Doubled(LlamaForCausalLM):
    """Logits twice those of Llama."""

    config_class = DoubledConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_model("llama").to(torch.bfloat16), tmp_path_factory.mktemp("llama"))


def factory(folder, **options) -> ModelFactory:
    return ModelFactory(ModelConfig(model_name_or_path=str(folder), **options))


def test_a_model_is_float32_without_data_and_keeps_the_dtype_of_its_files(folder):
    model = factory(folder).create()
    assert model.training
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(not buffer.is_meta for buffer in model.buffers())
    assert model.config.dtype == torch.bfloat16
    assert model.config._attn_implementation == "sdpa"
    assert factory(folder, attn_implementation="eager").create().config._attn_implementation == "eager"


def test_a_class_from_a_file_outside_the_package(folder, tmp_path, monkeypatch):
    (tmp_path / "doubled_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    model = factory(folder, plugins=["doubled_plugin"], model_id="doubled").create()
    assert type(model) is sys.modules["doubled_plugin"].Doubled
    assert type(model.config).__name__ == "DoubledConfig"
    load_weights(model, folder)
    plain = factory(folder).create()
    load_weights(plain, folder)
    ids = torch.arange(3, 9)[None]
    assert torch.equal(model(ids, use_cache=False).logits, 2 * plain(ids, use_cache=False).logits)
    with pytest.raises(ConfigError, match="'doubbled' is not registered; did you mean 'doubled'"):
        get_model_class("doubbled")
    with pytest.raises(ValueError, match="'doubled' is registered already"):
        register("doubled")(type(plain))


def test_code_of_the_folder_runs_only_when_it_is_trusted(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "foreign",
        "auto_map": {"AutoConfig": "code.Foreign", "AutoModelForCausalLM": "code.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Foreign(LlamaConfig):\n    model_type = 'foreign'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Foreign\n"
    )
    with pytest.raises(ConfigError, match="trust_remote_code"):
        factory(tmp_path).create()
    assert type(factory(tmp_path, trust_remote_code=True).create()).__name__ == "Model"


def test_the_tokenizer_comes_with_the_model_or_from_its_own_folder(folder):
    expected = AutoTokenizer.from_pretrained(TOKENIZER)("hello")
    assert factory(folder, tokenizer_name_or_path=str(TOKENIZER)).create_tokenizer()("hello") == expected
    with pytest.raises(DataError, match=r"has no tokenizer .* model\.tokenizer_name_or_path names the folder"):
        factory(folder).create_tokenizer()


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(DataError, match="is not a folder; models are read from local folders only"):
        factory(tmp_path / "nowhere").create()
    with pytest.raises(DataError, match=r"has no config\.json"):
        factory(tmp_path).create()
    with pytest.raises(ConfigError, match=r"model\.plugins: cannot import 'no_such_plugin'"):
        factory(folder, plugins=["no_such_plugin"])
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match=r"no_such_model"):
        factory(tmp_path).create()
    quantized = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(DataError, match="quantised weights can't be trained"):
        factory(tmp_path).create()
