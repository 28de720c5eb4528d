"""``--dry-run``: all that can be checked without training, for any number of ranks in this one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from mindspeed_llm.config import Config
from mindspeed_llm.data.factory import DataFactory
from mindspeed_llm.data.loader import StepLoader
from mindspeed_llm.data.report import render_first_sample
from mindspeed_llm.foundation.seed import set_seed
from mindspeed_llm.logging import set_up_logging
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.fused import fuse_operators
from mindspeed_llm.parallel.fsdp import DTYPES
from mindspeed_llm.parallel.mesh import build_mesh
from mindspeed_llm.parallel.parallelize import parallelize

_GIB = 2**30


def dry_run(config: Config, world_size: int) -> None:
    """Build model and data as rank 0 of ``world_size`` would, without weights, and print what the run would be.

    ``config`` has been through ``validate_world``. Raises what the run itself would raise before its first step.
    """
    set_up_logging(0)
    set_seed(config.training.seed, deterministic=config.training.deterministic)
    factory = ModelFactory(config.model)
    tokenizer = factory.create_tokenizer()
    data = DataFactory(config, tokenizer, rank=0, world_size=world_size).create()
    print(f"{data.report}\n{render_first_sample(data.train, tokenizer)}")
    model = factory.create()
    fuse_operators(model, config.optimization)
    with _pretended_ranks(world_size):
        parallelize(model, build_mesh(config.parallel, world_size, torch.device("cpu")), config.parallel)
        print(_describe_model(model, config, world_size))
    loader = StepLoader(
        data.train,
        batch_size=config.training.per_device_train_batch_size,
        accumulation=config.training.gradient_accumulation_steps,
        world_size=world_size,
        drop_last=config.training.dataloader_drop_last,
        pad_token_id=tokenizer.pad_token_id,
    )
    print(_describe_steps(config, len(data.train), len(loader), world_size))


@contextmanager
def _pretended_ranks(world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` in which nothing is ever sent: enough to cut a model without weights."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Sizes:
    total: int  # parameters of the model
    local: int  # of them on rank 0
    largest_unit: int  # parameters that are gathered together


def _sizes(model: PreTrainedModel) -> _Sizes:
    parameters = list(model.parameters())
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = {id(p) for unit in units if unit is not model for p in unit.parameters()}
    rest = sum(p.numel() for p in parameters if id(p) not in inner)  # the root's own
    largest = max([rest, *(sum(p.numel() for p in unit.parameters()) for unit in units if unit is not model)])
    return _Sizes(sum(p.numel() for p in parameters), local, largest)


def _describe_model(model: PreTrainedModel, config: Config, world_size: int) -> str:
    sizes, parallel = _sizes(model), config.parallel
    compute_bytes = DTYPES[parallel.param_dtype].itemsize
    weights = sizes.local * 4 / _GIB  # float32 masters; the gradients and the two moments of AdamW are as large
    ahead = 1 + max(parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch)
    gathered = ahead * sizes.largest_unit * compute_bytes / _GIB if world_size > 1 or compute_bytes != 4 else 0.0
    return (
        f"model {type(model).__mro__[1].__name__}: {sizes.total:,} parameters, {sizes.local:,} on a rank\n"
        f"ranks {world_size} = dp_replicate_size {parallel.dp_replicate_size} × fsdp_size {parallel.fsdp_size}\n"
        f"memory of a rank: weights {weights:.2f} + gradients {weights:.2f} + optimizer {2 * weights:.2f} + gathered "
        f"parameters {gathered:.2f} = {4 * weights + gathered:.2f} GiB; activations come on top"
    )


def _describe_steps(config: Config, rows: int, steps_per_epoch: int, world_size: int) -> str:
    training = config.training
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    total = training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * steps_per_epoch)
    return (
        f"step {batch} rows × {accumulation} micro-batches × {world_size} ranks = {batch * accumulation * world_size} "
        f"rows\nsteps {steps_per_epoch} per epoch of {rows} rows, {total} in all"
    )
