"""``torch.compile`` of the decoder layers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from mindspeed_llm.parallel.structure import decoder_layers


def apply_compile(model: PreTrainedModel) -> None:
    """Compile the forward of every decoder layer; layers that differ in their weights alone share one compilation.

    The forward and not the module: names stay those of the checkpoint, and the hooks of recomputation and of FSDP stay
    around what is compiled. What exchanges with other ranks (``torch.compiler.disable``) runs as it is, between the
    compiled parts.
    """
    # A layer is compiled anew for evaluation, for lengths that vary and with recomputation: more often than by default.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward)
