"""How many bytes a rank sends to others in an optimizer step, from shapes alone.

Counted is what has to leave the rank: its shard to everyone who gathers it, its part of the sums that are others', the
rows of other ranks. A few scalars (counts, losses, norms) come on top, and with context parallelism what linear
attention exchanges and the router logits of a balancing loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.fsdp import DTYPES
from mindspeed_llm.parallel.structure import expert_modules, float32_routers


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends."""

    parameters: float = 0.0
    """To gather parameters, in forward and in backward."""
    gradients: float = 0.0
    """To sum gradients, once a step."""
    experts: float = 0.0
    """Tokens to their experts, results back, and the gradients of both."""
    attention: float = 0.0
    """Heads, or keys and values, of context parallelism, and their gradients."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.experts + self.attention


def step_traffic(model: PreTrainedModel, parallel: ParallelConfig, micro_batches: int, tokens: int) -> Traffic:
    """Of a rank and a step of ``micro_batches`` micro-batches with ``tokens`` tokens each, of which context parallelism
    leaves the rank a part. ``model`` is parallelized, its weights may be on the meta device; ``parallel`` is validated.

    Routers are taken to choose at random, which decides how often a token leaves its rank.
    """
    size, tokens = DTYPES[parallel.param_dtype].itemsize, math.ceil(tokens / parallel.cp_size)
    experts = expert_modules(model) if parallel.ep_size > 1 else []
    rows = expected_rows(tokens, parallel.ep_size, _top_k(model)) if experts else 0.0
    return Traffic(
        parameters=micro_batches * parameter_bytes(model, parallel),
        gradients=gradient_bytes(model, parallel),
        experts=micro_batches * sum(expert_bytes(model, parallel, rows, rows, size) for _ in experts),
        attention=micro_batches * _num_attention_layers(model) * attention_bytes(model, parallel, tokens, size)
        if parallel.cp_size > 1
        else 0.0,
    )


# ---- sharded parameters -----------------------------------------------------------------------------------------


def parameter_bytes(model: PreTrainedModel, parallel: ParallelConfig) -> int:
    """To gather the parameters of every FSDP unit, for one micro-batch: once, or twice if they are freed in between."""
    routers, total = set(float32_routers(model)), 0
    for unit, parameters in _units(model):
        stays = unit is model or unit in routers or not parallel.reshard_after_forward
        size = 4 if unit in routers else DTYPES[parallel.param_dtype].itemsize
        for parameter in parameters:
            total += (1 if stays else 2) * size * _shard_numel(parameter) * (_num_shards(parameter) - 1)
    return total


def gradient_bytes(model: PreTrainedModel, parallel: ParallelConfig) -> float:
    """To sum the gradients: reduce-scatter over the shards, then all-reduce over the copies."""
    total = 0.0
    for _, parameters in _units(model):
        for parameter in parameters:
            if parameter.requires_grad:
                copies = _mesh_size(parameter, "dp_replicate")
                total += _shard_numel(parameter) * (_num_shards(parameter) - 1 + 2 * (copies - 1) / copies)
    return total * DTYPES[parallel.reduce_dtype].itemsize


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[DTensor]]]:
    """FSDP's units with the parameters that are theirs and not those of a unit inside."""
    taken: set[int] = set()
    for unit in reversed([unit for unit in model.modules() if isinstance(unit, FSDPModule)]):  # the inner ones first
        own = {id(p): p for p in unit.parameters() if isinstance(p, DTensor) and id(p) not in taken}
        taken |= own.keys()
        yield unit, list(own.values())


def _shard_numel(parameter: DTensor) -> int:
    """Elements of a rank's shard, with the padding that makes all shards equal."""
    names = parameter.device_mesh.mesh_dim_names or ()
    (shard,) = (p for name, p in zip(names, parameter.placements, strict=True) if name.endswith("fsdp"))
    assert isinstance(shard, Shard)
    size = parameter.shape[shard.dim]
    held = parameter.numel() // _mesh_size(parameter, "ep")
    return held // size * math.ceil(size / _num_shards(parameter))


def _num_shards(parameter: DTensor) -> int:
    return _mesh_size(parameter, "fsdp") * _mesh_size(parameter, "efsdp")


def _mesh_size(parameter: DTensor, name: str) -> int:
    """Ranks along a dimension of the parameter's mesh; 1 if it has no such dimension."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.device_mesh.size(names.index(name)) if name in names else 1


# ---- tokens and heads -------------------------------------------------------------------------------------------


def expected_rows(tokens: int, ranks: int, top_k: int) -> float:
    """Copies of ``tokens`` tokens that go to other ranks when each chooses ``top_k`` experts at random."""
    return tokens * (ranks - 1) * (1 - (1 - 1 / ranks) ** top_k)


def expert_bytes(model: PreTrainedModel, parallel: ParallelConfig, sent: float, received: float, size: int) -> float:
    """For one layer and micro-batch in which a rank sends ``sent`` rows to others and receives ``received`` of theirs.

    A row is hidden states and the weights of its choices, of ``size`` bytes a number, and the choices, of 8 bytes.
    """
    top_k = _top_k(model)
    hidden, weights = model.config.get_text_config().hidden_size * size, top_k * size
    counts = 16 * (parallel.ep_size - 1) * (1 if parallel.ep_dispatcher == "eager" else 2)
    forward = counts + sent * (top_k * 8 + hidden + weights) + received * hidden
    backward = received * (hidden + weights) + sent * hidden
    return _forward_passes(parallel) * forward + backward


def _top_k(model: PreTrainedModel) -> int:
    """How many experts a token chooses, which configurations have several names for; 0 where it is none of these."""
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk")
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def attention_bytes(model: PreTrainedModel, parallel: ParallelConfig, tokens: int, size: int) -> float:
    """For one attention layer and micro-batch of which a rank has ``tokens`` tokens, numbers of ``size`` bytes."""
    ulysses = {"ulysses": parallel.cp_size, "ring": 1, "hybrid": parallel.ulysses_size or 1}[parallel.cp_type]
    ring, passes = parallel.cp_size // ulysses, _forward_passes(parallel)
    heads, kv_heads, key_dim, value_dim = _geometry(model)
    kv_heads = math.lcm(kv_heads, ulysses)  # repeated where there are fewer than ranks
    per_token = heads * key_dim + kv_heads * (key_dim + value_dim) + heads * value_dim  # q, k, v there, the output back
    exchanged = (passes + 1) * tokens * per_token * size * (ulysses - 1) // ulysses
    hop = tokens * kv_heads * (key_dim + value_dim)  # all of Ulysses' tokens, a part of the heads
    # In backward keys and values go round once more; their float32 gradients follow and take a hop more to come home.
    passed_on = hop * ((passes + 1) * (ring - 1) * size + ring * 4 * (ring > 1))
    return exchanged + passed_on


def _forward_passes(parallel: ParallelConfig) -> int:
    return 2 if parallel.recompute and parallel.recompute_mode == "full" else 1


def _geometry(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """Heads of queries, heads of keys and values, and the sizes of a key and a value."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: every head has keys of its own once they are made
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_dim, head_dim


def _num_attention_layers(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum("attention" in kind and "linear" not in kind for kind in kinds)
