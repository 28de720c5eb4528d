"""Run by test_loading.py on four ranks: what each rank holds after ``load_weights`` is its part of the whole.

loading_worker.py FOLDER_OF_QWEN3_MOE FOLDER_OF_LLAMA_TIED FOLDER_OF_PHI3 FOLDER_OF_LARGE_MODEL
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.models.initialize import initialize_weights
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.models.skeleton import parameters_on_meta
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.memory import SLACK, PeakMemory
from tests.llm.models.architectures import make_config, make_large_model


def empty_model(name: str) -> PreTrainedModel:
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)


def make_empty_large_model() -> PreTrainedModel:
    with parameters_on_meta():
        return make_large_model()


def shard_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_parameters(folder: str) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def part(tensor: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    """The rank-th of torch.chunk's parts, of which there may be fewer than ranks."""
    chunks = tensor.chunk(ranks, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def check_fsdp(name: str, folder: str, mesh: DeviceMesh) -> None:
    """A vocabulary of 65, three experts and vectors of 8 elements do not divide by four."""
    model, expected = empty_model(name), whole_parameters(folder)
    shard_layers(model, mesh)
    load_weights(model, folder)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), part(expected[key], mesh.get_local_rank(), mesh.size())), (name, key)
    if name == "llama_tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


def spread_experts(model: PreTrainedModel) -> None:
    """Experts cut in two over ep in dimension 0, and in two over efsdp in another; everything else in four."""
    parallel = ParallelConfig(ep_size=2)
    parallelize(model, build_meshes(parallel, 4, torch.device("cpu")), parallel)


def check_experts(folder: str, rank: int) -> None:
    """Loaded or drawn, a rank's experts are its part of what one process has."""
    whole = make_empty_large_model()
    initialize_weights(whole, seed=5)
    drawn = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    efsdp, ep = divmod(rank, 2)
    for fill, expected in (
        (lambda model: load_weights(model, folder), whole_parameters(folder)),
        (lambda model: initialize_weights(model, seed=5), drawn),
    ):
        model = make_empty_large_model()
        spread_experts(model)
        fill(model)
        for key, parameter in model.named_parameters():
            experts = "experts" in key
            mine = part(part(expected[key], ep, 2), efsdp, 2, dim=1) if experts else part(expected[key], rank, 4)
            assert torch.equal(parameter.to_local(), mine), key


def check_initialization(mesh: DeviceMesh) -> None:
    """Every rank draws the same values and keeps its part of them."""
    whole, model = empty_model("qwen3_moe"), empty_model("qwen3_moe")
    initialize_weights(whole, seed=5)
    fully_shard(model, mesh=mesh)
    initialize_weights(model, seed=5)
    for key, parameter in model.named_parameters():
        expected = part(whole.get_parameter(key).detach(), mesh.get_local_rank(), mesh.size())
        assert torch.equal(parameter.to_local(), expected), key


def check_memory(folder: str, shard: Callable[[PreTrainedModel], None]) -> None:
    """Filling a model takes a rank its shards and one tensor (loading) or one module (initialising) more."""
    for fill in (lambda model: load_weights(model, folder), lambda model: initialize_weights(model, 0)):
        model = make_empty_large_model()
        shard(model)
        with PeakMemory() as peak:
            fill(model)
        shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
        largest = max(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        assert shards < peak.growth < shards + largest + SLACK, (peak.growth, shards, largest)


with start() as distributed:
    fsdp = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    for name, folder in zip(("qwen3_moe", "llama_tied", "phi3"), sys.argv[1:4], strict=True):
        check_fsdp(name, folder, fsdp)
    check_initialization(fsdp)
    check_memory(sys.argv[4], partial(shard_layers, mesh=fsdp))
    check_memory(sys.argv[4], spread_experts)
    check_experts(sys.argv[4], distributed.rank)
