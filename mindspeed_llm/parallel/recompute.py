"""Activation recomputation: keep a layer's input, run its forward again in backward."""

from __future__ import annotations

from torch.distributed._composable import checkpoint
from transformers import PreTrainedModel

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.parallel.patterns import match_modules
from mindspeed_llm.parallel.structure import decoder_layers


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
        checkpoint(module)
