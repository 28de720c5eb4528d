"""Fused operators for training language models, written in C++, for plain PyTorch and Hugging Face transformers.

Each operator is a function here and a PyTorch operator ``torch.ops.mindspeed.<name>`` with gradients and tracing rules;
:mod:`mindspeed_kernels.reference` defines what it computes. Float32, bfloat16 and float16 on the CPU run compiled
kernels, everything else runs the reference. ``python -m mindspeed_kernels`` reports what this machine uses.
"""

from mindspeed_kernels._loader import load_extension

load_extension()  # before the modules below, which add gradients and shapes to the operators that it registers

from mindspeed_kernels.ops.adamw import adamw_step_  # noqa: E402
from mindspeed_kernels.ops.causal_conv1d import causal_conv1d  # noqa: E402
from mindspeed_kernels.ops.flash_attention import flash_attention  # noqa: E402
from mindspeed_kernels.ops.fused_experts import fused_experts  # noqa: E402
from mindspeed_kernels.ops.gated_delta_rule import gated_delta_rule  # noqa: E402
from mindspeed_kernels.ops.grouped_gemm import grouped_gemm  # noqa: E402
from mindspeed_kernels.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from mindspeed_kernels.ops.moe_permute import moe_permute, moe_unpermute  # noqa: E402
from mindspeed_kernels.ops.newton_schulz import newton_schulz  # noqa: E402
from mindspeed_kernels.ops.rms_norm import rms_norm  # noqa: E402
from mindspeed_kernels.ops.rms_norm_gated import rms_norm_gated  # noqa: E402
from mindspeed_kernels.ops.rotary import rotary  # noqa: E402
from mindspeed_kernels.ops.route import route  # noqa: E402
from mindspeed_kernels.ops.swiglu import swiglu  # noqa: E402

__all__ = [
    "adamw_step_",
    "causal_conv1d",
    "flash_attention",
    "fused_experts",
    "gated_delta_rule",
    "grouped_gemm",
    "linear_cross_entropy",
    "moe_permute",
    "moe_unpermute",
    "newton_schulz",
    "rms_norm",
    "rms_norm_gated",
    "rotary",
    "route",
    "swiglu",
]
