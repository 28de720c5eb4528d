"""Fused operators in a model, as the configuration asks for."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from mindspeed_kernels import hf
from mindspeed_llm.config import Config
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.foundation import device as devices


def fuse_operators(model: PreTrainedModel, config: Config, device: torch.device) -> None:
    """Put in what the configuration switches on, wherever it proves equal to the model's own code.

    Raises ConfigError if the model must have fused attention and cannot.
    """
    _fuse_attention(model, config, device)
    ops = [name for name, wanted in _switches(config).items() if wanted]
    if ops:
        hf.apply(model, ops=ops)  # prints what it did, and warns where it would not


def _fuse_attention(model: PreTrainedModel, config: Config, device: torch.device) -> None:
    """Where there is no kernel, the model's own attention is faster than the definition of ours."""
    asked_for = config.model.attn_implementation == "mindspeed"
    by_default = config.model.attn_implementation is None and config.optimization.use_flash_attn
    if config.parallel.cp_size > 1 or not (asked_for or (by_default and devices.has_fused_attention(device))):
        return  # context parallelism brings an attention of its own
    report = hf.use_attention(model)  # prints what it did
    if asked_for and not report.switched:
        why = next((f"{site.path} {site.outcome}" for site in report.sites if not site.fused), "it has no attention")
        raise ConfigError(f"model.attn_implementation: mindspeed is not possible for this model: {why}; leave it out")


def _switches(config: Config) -> dict[str, bool]:
    optimization = config.optimization
    return {
        "rms_norm": optimization.use_fused_rmsnorm,
        "rotary": optimization.use_fused_rotary_pos_emb,
        "swiglu": optimization.use_fused_swiglu,
        "experts": optimization.moe_grouped_gemm,
        "rms_norm_gated": optimization.use_fused_rmsnorm,
        "linear_attention": optimization.use_flash_gdn,
        # Context parallelism finds documents before it cuts the rows.
        "documents": optimization.use_flash_gdn and config.parallel.cp_size == 1,
    }
