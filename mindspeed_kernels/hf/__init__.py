"""Fused operators for Hugging Face models, put in with proof: `report = mindspeed_kernels.hf.apply(model)`."""

from mindspeed_kernels.hf.experts import register as register_experts
from mindspeed_kernels.hf.patch import apply
from mindspeed_kernels.hf.report import Report, Site

__all__ = ["Report", "Site", "apply", "register_experts"]
