"""Attention across a context-parallel group, as a function of transformers' attention interface."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface

from mindspeed_kernels.hf.attention_mask import MaskFunction, MaskParts, read_mask
from mindspeed_kernels.ops.flash_attention import flash_attention
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.parallel.context.layout import SequenceLayout
from mindspeed_llm.parallel.context.ring import Scores, ring_attention
from mindspeed_llm.parallel.context.ulysses import repeat_for_ranks, to_heads, to_sequence

NAME = "context_parallel"
"""Under which transformers knows :func:`context_parallel_attention`."""
_HARMLESS = {"position_ids", "cache_position"}  # tensors that models hand on to attention, which does not need them


class ContextAttention:
    """The attention of one model: its process groups, and where the documents of the present micro-batch lie.

    Within a ring's rank, Ulysses' ranks exchange their tokens for heads; the rings attend, each for its heads::

        ring 2 x ulysses 2     tokens of       attends with
        rank 0   (0, 0)        chunks 0, 3     heads 0, 1 to chunks 0, 3, then to chunks 1, 2 of rank 2
        rank 1   (0, 1)        chunks 0, 3     heads 2, 3 to chunks 0, 3, then to chunks 1, 2 of rank 3
        rank 2   (1, 0)        chunks 1, 2     heads 0, 1 to chunks 1, 2, then to chunks 0, 3 of rank 0
        rank 3   (1, 1)        chunks 1, 2     heads 2, 3 to chunks 1, 2, then to chunks 0, 3 of rank 1
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """``mesh`` is ``(batch, ring, ulysses)``."""
        self.ring: dist.ProcessGroup = mesh.get_group("ring")
        self.ulysses: dist.ProcessGroup = mesh.get_group("ulysses")
        self.layout: SequenceLayout | None = None
        self.called: set[nn.Module] = set()
        """Modules that attended since the present micro-batch began."""

    def present_layout(self) -> SequenceLayout:
        """That of the present micro-batch."""
        if self.layout is None:
            raise RuntimeError("context parallelism needs batches that ContextSharder.shard_batch has cut")
        return self.layout

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores) -> Tensor:
        """From this rank's ``[batch, seq, heads, dim]`` to its ``[batch, seq, num_heads, value_dim]``. Collective."""
        layout, ranks = self.present_layout(), self.ulysses.size()
        if ranks > 1:
            k, v = (repeat_for_ranks(x, ranks) for x in (k, v))
            q, k, v = to_heads((q, k, v), self.ulysses)
            sinks = None if sinks is None else sinks.chunk(ranks)[self.ulysses.rank()]
        if self.ring.size() > 1:
            out = ring_attention(q, k, v, sinks, layout, scores, self.ring)
        else:
            ends = layout.cu_seqlens
            packed = flash_attention(
                *(x.flatten(0, 1) for x in (q, k, v)), sinks=sinks, cu_seqlens_q=ends, cu_seqlens_k=ends, **vars(scores)
            )
            out = packed.unflatten(0, q.shape[:2])
        return to_sequence(out, self.ulysses) if ranks > 1 else out


@torch.compiler.disable  # which blocks there are, the documents of each batch say
def context_parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskParts | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: from ``[batch, heads, seq, dim]`` to ``[batch, seq, num_heads, value_dim]``.

    Which keys a query sees, the documents of the micro-batch and a window say. That of the mask, from
    :func:`what_is_visible`, is what transformers' other implementations follow; not all modules pass it on.

    Raises ConfigError for anything else that would change the result.
    """
    mask = attention_mask if isinstance(attention_mask, MaskParts) else MaskParts(causal=True, window=sliding_window)
    unknown = {name: x for name, x in others.items() if isinstance(x, Tensor) and name not in _HARMLESS}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for what, present in {
        "an attention mask of its own": isinstance(attention_mask, Tensor),
        "a window that its mask does not have": sliding_window not in (None, mask.window),
        "attention in chunks": mask.chunk_size is not None,
        "dropout": dropout > 0,
        "attention that is not causal": not (causal and mask.causal),
        f"the attention argument {', '.join(unknown)}": bool(unknown),
    }.items():
        if present:
            raise ConfigError(f"parallel.cp_size: {type(module).__name__} has {what}, which cannot be cut over ranks")
    attend = cast(ContextAttention, module.context_parallel)
    attend.called.add(module)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, s_aux, Scores(scaling, mask.window, softcap)), None


def what_is_visible(*args: Any, mask_function: MaskFunction, **_: Any) -> MaskParts:
    """transformers' interface of masks: the parts of one, whose documents are those of a part of the rows and unused.

    Raises ConfigError for a mask of other parts.
    """
    try:
        return read_mask(mask_function)
    except ValueError as error:
        raise ConfigError(
            "parallel.cp_size: the model masks attention by more than documents and a window, which cannot be cut over "
            "ranks; set cp_size to 1 for this model"
        ) from error


AttentionInterface.register(NAME, context_parallel_attention)
AttentionMaskInterface.register(NAME, what_is_visible)
