"""Activation recomputation: keep a layer's input, run its forward again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._composable import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.context import ring  # noqa: F401  # defines ring_attention
from mindspeed_llm.parallel.patterns import match_modules
from mindspeed_llm.parallel.structure import decoder_layers

aten, mindspeed = torch.ops.aten, torch.ops.mindspeed
KEPT = [
    mindspeed.flash_attention_forward.default,
    mindspeed.gated_delta_rule.default,
    torch.ops.mindspeed_llm.ring_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,  # of accelerators that PyTorch does not know
    mindspeed.fused_experts.default,
    torch.ops._c10d_functional.all_to_all_single.default,  # heads to Ulysses' ranks, tokens to their experts, and back
]
"""Operators that ``recompute_mode: selective`` does not run again: costly ones, whose results are small beside that."""


def apply_recompute(model: PreTrainedModel, parallel: ParallelConfig) -> None:
    """Recompute every decoder layer, or the modules that ``recompute_modules`` names.

    The composable form adds hooks instead of a wrapper, so parameter names stay those of the checkpoint. It must come
    before ``fully_shard``: the recomputed forward then gathers parameters through FSDP's own hooks.
    """
    if not parallel.recompute:
        return
    if parallel.recompute_modules is None:
        modules = decoder_layers(model)
    else:
        modules = [module for _, module in match_modules(model, parallel.recompute_modules, "recompute_modules")]
    for module in modules:
        checkpoint(module, **_OPTIONS[parallel.recompute_mode])


class _OfKept(TorchDispatchMode):
    """Confines a mode of selective checkpointing to ``KEPT``.

    It wants to see the same operators in both passes, but FSDP's hooks run in them too, and gather what is not there.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _contexts() -> tuple[_OfKept, _OfKept]:
    """Of the forward pass and of its repetition."""
    first, again = create_selective_checkpoint_contexts(KEPT)
    return _OfKept(first), _OfKept(again)


_OPTIONS: dict[str, dict[str, Callable[[], Any]]] = {"full": {}, "selective": {"context_fn": _contexts}}
