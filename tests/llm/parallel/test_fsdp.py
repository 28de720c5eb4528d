"""Which modules become units; that layouts equal one process is tested in test_equivalence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.parallel.fsdp import apply_fsdp
from mindspeed_llm.parallel.mesh import build_meshes
from tests.llm.parallel.cases import build_model


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model, **options):
    parallel = ParallelConfig(param_dtype="fp32", fsdp_size=1, **options)
    apply_fsdp(model, build_meshes(parallel, 1, torch.device("cpu")), parallel)
    return model


def test_units_inside_units():
    model = sharded(build_model("qwen3"), fsdp_modules=["model.layers.{*}", "model.layers.{*}.mlp"])
    for layer in model.model.layers:
        assert isinstance(layer, FSDPModule)
        assert isinstance(layer.mlp, FSDPModule)
        assert not isinstance(layer.self_attn, FSDPModule)


def test_ignored_modules_are_not_sharded():
    model = build_model("qwen3")
    model.model.layers[0].mlp.requires_grad_(False)
    sharded(model, ignored_modules=["model.layers.{0}.mlp"])
    ignored = set(model.model.layers[0].mlp.parameters())
    assert {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)} == ignored


def test_ignored_modules_are_not_trained():
    """Nobody would sum their gradients over the ranks."""
    with pytest.raises(ConfigError, match=r"parallel.ignored_modules: model.layers.0.mlp is trained, but nothing sums"):
        sharded(build_model("qwen3"), ignored_modules=["model.layers.{0}.mlp"])
