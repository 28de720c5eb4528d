"""Fused operators for Hugging Face models, put in with proof.

`mindspeed_kernels.hf.use_attention(model)`, then `mindspeed_kernels.hf.apply(model)`.
"""

from mindspeed_kernels.hf.attention import register_attention
from mindspeed_kernels.hf.attention_proof import AttentionReport, use_attention
from mindspeed_kernels.hf.experts import register as register_experts
from mindspeed_kernels.hf.patch import apply
from mindspeed_kernels.hf.report import Report, Site

__all__ = ["AttentionReport", "Report", "Site", "apply", "register_attention", "register_experts", "use_attention"]
