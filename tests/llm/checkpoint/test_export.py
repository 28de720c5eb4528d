"""The exported folder is what transformers itself would have saved, and loads there without a word."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mindspeed_llm.checkpoint.export import export_hf
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.models.initialize import initialize_weights
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.models.skeleton import parameters_on_meta
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.distributed import REPOSITORY, launch
from tests.llm.memory import NO_HOARDING
from tests.llm.models.architectures import ARCHITECTURES, make_config, make_model, save

IDS = torch.arange(3, 15)[None]


@pytest.fixture(autouse=True)
def process_group():
    with start() as distributed:
        yield distributed


def empty_model(name: str):
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    result = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            result |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
    return result


def load_silently(folder: Path):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loaded_and_exported_is_the_same_checkpoint(name, tmp_path):
    original = save(make_model(name), tmp_path / "original")
    model = empty_model(name)
    load_weights(model, original)
    export_hf(model, None, tmp_path / "exported")
    expected, actual = tensors(original), tensors(tmp_path / "exported")
    assert actual.keys() == expected.keys()  # an entry per expert, no lm_head where it is tied, ...
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key
    loaded = load_silently(tmp_path / "exported")
    with torch.no_grad():
        assert torch.equal(loaded(IDS, use_cache=False).logits, make_model(name)(IDS, use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "qwen3_next", "gpt_oss"])
def test_a_sharded_model_from_scratch(name, tmp_path, process_group):
    model, parallel = empty_model(name), ParallelConfig()
    parallelize(model, build_meshes(parallel, 1, process_group.device), parallel)
    initialize_weights(model, 0)
    export_hf(model, AutoTokenizer.from_pretrained(REPOSITORY / "tests/data/oracles/tokenizer"), tmp_path / "hf")
    loaded = dict(load_silently(tmp_path / "hf").named_parameters())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), loaded[key]), key
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert not config["architectures"][0].startswith("FSDP")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


@pytest.mark.parametrize(
    ("own", "trained", "expected"),
    [(None, None, 962), (7, None, 7), (None, 5, [962, 5]), (7, 5, [7, 5]), ([7, 5], 5, [7, 5]), (5, 5, 5)],
)
def test_generation_ends_where_answers_do(own, trained, expected, tmp_path):
    """Where the model's own does, else at the tokenizer's end of text; and at the token that was trained."""
    model, tokenizer = make_model("llama"), AutoTokenizer.from_pretrained(REPOSITORY / "tests/data/oracles/tokenizer")
    model.generation_config.eos_token_id = own
    export_hf(model, tokenizer, tmp_path / "hf", end_of_answers=trained)
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == expected
    assert model.generation_config.eos_token_id == own


def test_bfloat16_checkpoints_stay_bfloat16(tmp_path):
    original = save(make_model("llama").to(torch.bfloat16), tmp_path / "original")
    model = empty_model("llama")
    load_weights(model, original)
    model.config.dtype = torch.bfloat16  # as ModelFactory leaves it
    export_hf(model, None, tmp_path / "exported")
    assert {tensor.dtype for tensor in tensors(tmp_path / "exported").values()} == {torch.bfloat16}


def test_the_index_lists_what_the_files_hold(tmp_path):
    model = make_model("llama")
    export_hf(model, None, tmp_path / "hf", max_file_bytes=30_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    held = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert len(set(held.values())) > 1
    assert index["weight_map"] == held
    load_silently(tmp_path / "hf")


def test_an_older_export_is_replaced_whole(tmp_path):
    export_hf(make_model("llama"), None, tmp_path / "hf", max_file_bytes=30_000)
    export_hf(make_model("llama_tied"), None, tmp_path / "hf")
    assert not list((tmp_path / "hf").glob("*.index.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    load_silently(tmp_path / "hf")


def test_two_ranks_write_one_checkpoint(tmp_path):
    """And neither holds the model in doing so."""
    original = save(make_model("qwen3_moe"), tmp_path / "original")
    worker = str(Path(__file__).with_name("export_worker.py"))
    finished = launch([worker, str(original), str(tmp_path / "hf"), str(tmp_path / "large")], 2, env=NO_HOARDING)
    assert finished.returncode == 0, finished.stderr
    expected, actual = tensors(original), tensors(tmp_path / "hf")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
