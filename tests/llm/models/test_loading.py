"""A checkpoint read straight into a model, whole or in shards, is the model that transformers reads."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from mindspeed_llm.errors import DataError
from mindspeed_llm.models import files
from mindspeed_llm.models.lazy_tensor import LazyTensor
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.models.skeleton import named_state, parameters_on_meta
from tests.distributed import launch
from tests.llm.memory import NO_HOARDING
from tests.llm.models.architectures import ARCHITECTURES, make_config, make_large_model, make_model, save

IDS = torch.arange(3, 15)[None]


def empty_model(name: str):
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the checkpoint of an architecture is, written once by transformers itself in several files."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save(make_model(name), tmp_path_factory.mktemp(name), max_shard_size="60KB")
        return made[name]

    return get


@contextmanager
def rank(number: int, world_size: int):
    """This process as one rank of many; nothing that it sends arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_transformers(name, folder):
    expected, model = make_model(name), empty_model(name)
    load_weights(model, folder(name))
    state = named_state(model)
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key], value), key
    for key, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(key), value), key
        assert model.get_buffer(key).dtype == value.dtype, key
    for target, source in expected.all_tied_weights_keys.items():
        assert model.get_parameter(target) is model.get_parameter(source)
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, expected(IDS, use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama_yarn", "llama_llama3", "gemma3_text", "deepseek_v4"])
def test_buffers_of_a_model_wholly_on_meta_are_restored(name, folder):
    """Peers' report E8."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    load_weights(model, folder(name))
    for key, value in make_model(name).named_buffers():
        assert torch.equal(model.get_buffer(key), value), key


def test_shards_on_four_ranks(folder, tmp_path):
    """Uneven shards, tied weights, experts on a mesh of two dimensions: each rank holds the right parts, and never more
    memory than they take and one tensor."""
    folders = [folder("qwen3_moe"), folder("llama_tied"), folder("phi3"), save(make_large_model(), tmp_path)]
    worker = str(Path(__file__).with_name("loading_worker.py"))
    finished = launch([worker, *map(str, folders)], 4, env=NO_HOARDING)
    assert finished.returncode == 0, finished.stderr


def record_reads(monkeypatch) -> dict[str, int]:
    """Elements read, by checkpoint key."""
    opened: dict[str, int] = {}
    make = files._lazy

    def recorded(file, name):
        lazy = make(file, name)
        reader = lazy.reader

        def read(box, target):
            opened[name] = opened.get(name, 0) + target.numel()
            reader(box, target)

        return LazyTensor(lazy.shape, lazy.dtype, read)

    monkeypatch.setattr(files, "_lazy", recorded)
    return opened


def test_a_rank_reads_its_shards_and_nothing_else(folder, monkeypatch):
    path = folder("qwen3_moe")  # written before this process plays another rank
    model, opened = empty_model("qwen3_moe"), record_reads(monkeypatch)
    with rank(1, 4):
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        load_weights(model, path)
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert sum(opened.values()) == local


def test_a_rank_opens_its_own_experts_only(folder, monkeypatch):
    """Expert parallel over 3 ranks in dimension 0; in dimension 1, [gate; up], the first of 2 is all of gate."""
    path = folder("qwen3_moe")
    model, opened = empty_model("qwen3_moe"), record_reads(monkeypatch)
    with rank(1, 6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("efsdp", "ep"))
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for key, parameter in experts._parameters.items():
                experts._parameters[key] = nn.Parameter(distribute_tensor(parameter, mesh, (Shard(1), Shard(0))))
        load_weights(model, path)
    experts = {key.split(".mlp.experts.")[1] for key in opened if ".experts." in key}
    assert experts == {"1.gate_proj.weight", "1.down_proj.weight"}


def test_loading_into_real_parameters_and_under_wrappers(folder):
    expected, model = make_model("qwen3_moe"), make_model("qwen3_moe", seed=1)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    model.model.norm.forward = model.model.norm.forward.__get__(model.model.norm)  # an instance's own forward
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    parameters = list(model.parameters())
    load_weights(model, folder("qwen3_moe"))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(IDS, use_cache=False).logits, expected(IDS, use_cache=False).logits)


def test_bfloat16_files_become_float32_parameters(tmp_path):
    stored = make_model("llama").to(torch.bfloat16)
    model = empty_model("llama")
    load_weights(model, save(stored, tmp_path))
    for key, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored.get_parameter(key).float())


# ---- what is wrong is named -------------------------------------------------------------------------------------


def changed(folder: Path, target: Path, change) -> Path:
    """The single-file copy of a checkpoint with ``change`` applied to its tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_file(save(model, target) / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 missing in the checkpoint:\n    model.norm.weight"),
        (
            lambda t: [t.pop(f"model.layers.0.mlp.experts.{i}.down_proj.weight") for i in range(3)],
            r"1 missing in the checkpoint:\n    model.layers.0.mlp.experts.down_proj",
        ),
        (
            lambda t: t.pop("model.layers.0.mlp.experts.1.down_proj.weight"),
            r"model.layers.0.mlp.experts.down_proj is \[2, 32, 20\] in the checkpoint, \[3, 32, 20\] in the model",
        ),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.1.up_proj.weight"),
            r"cannot make model.layers.1.mlp.experts.gate_up_proj of "
            r"model.layers.1.mlp.experts.0.gate_proj.weight \.\.\. .* \(5 tensors\)",
        ),
        (lambda t: t.update(extra=torch.zeros(2)), r"1 unknown to the model:\n    extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(64, 32)}),
            r"lm_head.weight is \[64, 32\] in the checkpoint, \[65, 32\] in the model",
        ),
    ],
)
def test_keys_that_do_not_fit(change, message, folder, tmp_path):
    """Peers' report E7: nothing stays random in silence."""
    wrong = changed(folder("qwen3_moe"), tmp_path, change)
    model = empty_model("qwen3_moe")
    with pytest.raises(DataError, match=message):
        load_weights(model, wrong)
    assert all(parameter.is_meta for parameter in model.parameters())  # found before anything was read


def test_a_cut_file_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder("llama"), broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(DataError, match=f"{shard.name} is damaged or cut short"):
        load_weights(empty_model("llama"), broken)
    shard.unlink()
    with pytest.raises(DataError, match=f"{shard.name} is missing, but model.safetensors.index.json lists it"):
        load_weights(empty_model("llama"), broken)


def test_an_index_that_lies_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder("llama"), broken)
    index = broken / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"index.json lists ghost.weight, which the file named there does not hold"):
        load_weights(empty_model("llama"), broken)
    index.write_text("{}")
    with pytest.raises(DataError, match="is not a safetensors index"):
        load_weights(empty_model("llama"), broken)


def test_other_formats_and_nothing_at_all(tmp_path):
    # VeOmni#118: a run on weights that were never loaded, at a loss of ln(vocabulary) for ever.
    with pytest.raises(DataError, match=r"has no \*.safetensors file; model.train_from_scratch: true begins"):
        load_weights(empty_model("llama"), tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match=r"it has pytorch_model.bin: convert with transformers' save_pretrained first"):
        load_weights(empty_model("llama"), tmp_path)


def test_a_tied_weight_under_both_names(folder, tmp_path):
    """Equal copies are fine whichever name comes first; different ones mean that the config is wrong."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    expected = make_model("llama_tied").get_parameter(embedding)
    both = changed(folder("llama_tied"), tmp_path / "a", lambda t: t.update({head: t[embedding].clone()}))
    only_head = changed(folder("llama_tied"), tmp_path / "b", lambda t: t.update({head: t.pop(embedding)}))
    for path in (both, only_head):
        model = empty_model("llama_tied")
        load_weights(model, path)
        assert model.get_parameter(head) is model.get_parameter(embedding)
        assert torch.equal(model.get_parameter(head), expected)
    different = changed(folder("llama_tied"), tmp_path / "c", lambda t: t.update({head: t[embedding] + 1}))
    with pytest.raises(DataError, match=r"model\.embed_tokens\.weight and lm_head\.weight differ"):
        load_weights(empty_model("llama_tied"), different)
