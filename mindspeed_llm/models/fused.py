"""Fused operators in a model, as the ``optimization`` section asks for."""

from __future__ import annotations

from transformers import PreTrainedModel

from mindspeed_kernels import hf
from mindspeed_llm.config import OptimizationConfig


def fuse_operators(model: PreTrainedModel, optimization: OptimizationConfig) -> None:
    """Replace what the section switches on, wherever the fused operator proves equal to the model's own code."""
    ops = [name for name, wanted in _switches(optimization).items() if wanted]
    if ops:
        hf.apply(model, ops=ops)  # prints what it did, and warns where it would not


def _switches(optimization: OptimizationConfig) -> dict[str, bool]:
    return {
        "rms_norm": optimization.use_fused_rmsnorm,
        "rotary": optimization.use_fused_rotary_pos_emb,
        "swiglu": optimization.use_fused_swiglu,
        "experts": optimization.moe_grouped_gemm,
    }
