"""``--dry-run``: all that can be checked without training, for any number of ranks in this one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from mindspeed_llm.checkpoint.checkpointer import Checkpointer
from mindspeed_llm.config import Config, validate_world
from mindspeed_llm.data.collate import padding_token
from mindspeed_llm.data.factory import Data, DataFactory
from mindspeed_llm.data.render import render_sample
from mindspeed_llm.data.stream_loader import StreamedData
from mindspeed_llm.data.training_loader import training_loader
from mindspeed_llm.foundation.seed import set_seed
from mindspeed_llm.logging import set_up_logging
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.fused import fuse_operators
from mindspeed_llm.models.loading import check_weights
from mindspeed_llm.optim.local import local
from mindspeed_llm.optim.muon import hidden_matrices
from mindspeed_llm.optim.scheduler import count_steps
from mindspeed_llm.parallel.fsdp import DTYPES
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from mindspeed_llm.parallel.traffic import step_traffic
from mindspeed_llm.routing import BiasBalancing


def dry_run(config: Config, world_size: int) -> None:
    """Build model and data as rank 0 of ``world_size`` would, without weights, and print what the run would be.

    Raises what the run itself would raise of configuration, data, model and sizes before its first step.
    """
    config = validate_world(config, world_size)
    set_up_logging(0)
    set_seed(config.training.seed, deterministic=config.training.deterministic)
    starting_point = Checkpointer(Path(config.training.output_dir)).starting_point(
        config.training.resume_from_checkpoint
    )
    factory = ModelFactory(config.model)
    tokenizer = factory.create_tokenizer()
    data = DataFactory(config, tokenizer).create()
    print(f"{data.report}\n{render_sample(data.first_row, tokenizer)}")
    model = factory.create()
    data.check_vocabulary(len(cast(torch.Tensor, model.get_input_embeddings().weight)))
    if not config.model.train_from_scratch:
        check_weights(model, config.model.model_name_or_path)
    fuse_operators(model, config, torch.device("cpu"))
    print(f"model {type(model).__name__}: {model.num_parameters():,} parameters")
    if config.training.router_bias_update_rate:
        BiasBalancing(model, config.training.router_bias_update_rate)
    with _pretended_ranks(world_size):
        parallelize(model, build_meshes(config.parallel, world_size, torch.device("cpu")), config.parallel)
        print(_describe_memory(model, config))
        if world_size > 1:
            print(_describe_traffic(model, config))
    data_ranks = world_size // config.parallel.cp_size
    loader = training_loader(data, config.training, world_size=data_ranks, pad_token_id=padding_token(tokenizer))
    print(_describe_steps(config, data, len(loader) / data.epochs, data_ranks))
    if starting_point is not None:
        print(f"goes on from {starting_point}")


@contextmanager
def _pretended_ranks(world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` in which nothing is ever sent: enough to cut a model without weights."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _describe_memory(model: PreTrainedModel, config: Config) -> str:
    parallel = config.parallel
    sizes = {p: 4 * local(p).numel() for p in model.parameters()}  # float32 masters, and gradients as large
    matrices = hidden_matrices(model) if config.training.optimizer == "muon" else set()
    weights, matrix_weights = sum(sizes.values()), sum(sizes[p] for p in sizes if p in matrices)
    optimizer = 2 * weights - matrix_weights  # AdamW's two moments, or Muon's momentum
    ahead = max(parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch)
    gathered = (1 + ahead) * _largest_unit(model) * DTYPES[parallel.param_dtype].itemsize
    return (
        f"ranks: dp_replicate_size {parallel.dp_replicate_size} × fsdp_size {parallel.fsdp_size}, of these ep_size "
        f"{parallel.ep_size} and cp_size {parallel.cp_size}\n"
        f"memory of a rank: weights {_gib(weights)} + gradients {_gib(weights)} + optimizer {_gib(optimizer)} + "
        f"parameters gathered for use {_gib(gathered)} = {_gib(2 * weights + optimizer + gathered)} GiB; activations "
        "come on top"
    )


def _describe_traffic(model: PreTrainedModel, config: Config) -> str:
    training = config.training
    tokens = training.max_tokens_per_batch or training.per_device_train_batch_size * config.data.cutoff_len
    sent = step_traffic(model, config.parallel, training.gradient_accumulation_steps, tokens)
    return (
        f"a rank sends in a step: parameters {_gib(sent.parameters)} + gradients {_gib(sent.gradients)} + tokens to "
        f"experts {_gib(sent.experts)} + heads, keys and values {_gib(sent.attention)} = {_gib(sent.total)} GiB at "
        "most; with experts chosen at random"
    )


def _largest_unit(model: PreTrainedModel) -> int:
    """Parameters of the largest module that FSDP gathers as a whole, without the units inside it."""
    taken: set[int] = set()
    sizes = []
    for unit in reversed([unit for unit in model.modules() if isinstance(unit, FSDPModule)]):  # the inner ones first
        own = {id(p): _gathered_size(p) for p in unit.parameters() if id(p) not in taken}
        sizes.append(sum(own.values()))
        taken |= own.keys()
    return max(sizes)


def _gathered_size(parameter: torch.Tensor) -> int:
    """Of a parameter that is spread by experts, a rank only ever gathers its own experts' part."""
    if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
        return parameter.numel() // parameter.device_mesh["ep"].size()
    return parameter.numel()


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def _describe_steps(config: Config, data: Data, steps_per_epoch: float, data_ranks: int) -> str:
    training = config.training
    accumulation = training.gradient_accumulation_steps
    steps = f"{count_steps(training, steps_per_epoch)} in all"
    if not isinstance(data.train, StreamedData):
        steps = f"{steps_per_epoch:.10g} per epoch of {len(data.train) / data.epochs:.10g} rows, {steps}"
    if training.max_tokens_per_batch is not None:
        unit, batch = "tokens at most", training.max_tokens_per_batch
    else:
        unit, batch = "rows", training.per_device_train_batch_size
    cp_size = config.parallel.cp_size
    ranks = f"{data_ranks} ranks" if cp_size == 1 else f"{data_ranks} groups of {cp_size} ranks"
    return (
        f"a step: {batch} {unit} × {accumulation} micro-batches × {ranks} = "
        f"{batch * accumulation * data_ranks} {unit}\nsteps: {steps}"
    )
