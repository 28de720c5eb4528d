"""Every parallel transformation of a model, in the one order in which they compose."""

from __future__ import annotations

from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.compile import apply_compile
from mindspeed_llm.parallel.context.apply import apply_context_parallel
from mindspeed_llm.parallel.expert import apply_expert_parallel
from mindspeed_llm.parallel.fsdp import apply_fsdp
from mindspeed_llm.parallel.mesh import Meshes
from mindspeed_llm.parallel.recompute import apply_recompute


def parallelize(model: PreTrainedModel, meshes: Meshes, parallel: ParallelConfig, *, compiled: bool = False) -> None:
    """Transform a model on the meta device in place; weights are materialised into the shards afterwards.

    ``compiled`` is ``training.compile``.
    """
    apply_context_parallel(model, meshes.context)
    apply_recompute(model, parallel)
    experts = apply_expert_parallel(model, meshes.expert, parallel.ep_dispatcher) if meshes.expert else []
    if compiled:
        apply_compile(model)
    apply_fsdp(model, meshes, parallel, experts)
