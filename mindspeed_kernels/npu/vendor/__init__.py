"""torch_npu's fused operators under the contracts of ours.

Sources of what they compute: op-plugin's documentation (https://gitcode.com/Ascend/op-plugin, docs/context) and that of
the aclnn functions behind it. Which calls are made, with which arguments, is checked against the wheel's own schemas
and shapes by tests/ascend/device.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_kernels.npu.implementation import Implementation
from mindspeed_kernels.npu.vendor import attention, grouped_gemm, moe, rms_norm, rotary, route, swiglu

TABLE: Mapping[str, Implementation] = {
    "rms_norm": Implementation(rms_norm.takes, rms_norm.forward),
    "add_rms_norm": Implementation(rms_norm.takes_sum, rms_norm.forward_of_sum),
    "rms_norm_backward": Implementation(rms_norm.takes_backward, rms_norm.backward),
    "rotary": Implementation(rotary.takes, rotary.forward),
    "rotary_backward": Implementation(rotary.takes_backward, rotary.backward),
    "swiglu": Implementation(swiglu.takes, swiglu.forward),
    "swiglu_backward": Implementation(swiglu.takes_backward, swiglu.backward),
    "flash_attention_forward": Implementation(attention.takes, attention.forward),
    "flash_attention_backward": Implementation(attention.takes_backward, attention.backward),
    "grouped_gemm": Implementation(grouped_gemm.takes, grouped_gemm.forward),
    "grouped_gemm_weight_gradient": Implementation(grouped_gemm.takes_weight_gradient, grouped_gemm.weight_gradient),
    "moe_permute": Implementation(moe.takes_permute, moe.permute),
    "moe_unpermute": Implementation(moe.takes_unpermute, moe.unpermute),
    "moe_unpermute_backward": Implementation(moe.takes_unpermute_backward, moe.unpermute_backward),
    "route": Implementation(route.takes, route.largest),
}

# What computes a gradient when an implementation that took the forward call does not take it.
REFERENCE: Mapping[str, Callable[..., Any]] = {"flash_attention_backward": attention.reference_backward}
