"""The experts of a mixture out of operators that an NPU has kernels for: no loop over experts, no wait for offsets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_kernels.npu.dispatch import dispatcher, on_npu
from mindspeed_kernels.ops.grouped_gemm import grouped_gemm
from mindspeed_kernels.ops.moe_permute import moe_permute, moe_unpermute
from mindspeed_kernels.ops.swiglu import swiglu


def takes(x: Tensor, gate_up: Tensor) -> bool:
    """Whether the products have kernels here; the loop of the definition would be slow."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    floats = half or x.dtype == torch.float32
    return on_npu(x) and floats and gate_up.dtype == x.dtype and dispatcher().choice.order("grouped_gemm") != ()


def fused_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
    up_offset: float,
) -> Tensor:
    """As :func:`mindspeed_kernels.fused_experts`; the weights are applied to the experts' outputs."""
    rows, offsets, source = moe_permute(x, top_k_index, len(gate_up))
    every = torch.arange(len(rows), device=x.device)
    expert = (
        (every.unsqueeze(1) >= offsets).sum(1).clamp(max=len(gate_up) - 1)
    )  # of each row; unused rows do not matter
    z = grouped_gemm(rows, gate_up, offsets, transposed=transposed)
    if gate_up_bias is not None:
        z = z + gate_up_bias[expert].to(z.dtype)
    if not interleaved and (alpha, limit, up_offset) == (1.0, math.inf, 0.0):
        h = swiglu(z)
    else:
        wide = z.float()
        gate, up = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = (gate * torch.sigmoid(alpha * gate) * (up + up_offset)).to(z.dtype)
    y = grouped_gemm(h, down, offsets, transposed=transposed)
    if down_bias is not None:
        y = y + down_bias[expert].to(y.dtype)
    return moe_unpermute(y, source, top_k_weights)
