"""Fused operators for training language models, written in C++, for plain PyTorch and Hugging Face transformers."""

from mindspeed_kernels.ops.rms_norm import rms_norm
from mindspeed_kernels.ops.rotary import rotary
from mindspeed_kernels.ops.swiglu import swiglu

__all__ = ["rms_norm", "rotary", "swiglu"]
