"""The AscendC kernels of csrc/ascend, where a build with CANN has made their library.

It registers them with PyTorch for the NPU's key, from where they are taken here: :mod:`mindspeed_kernels.npu.dispatch`
puts itself in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.npu.implementation import Implementation
from mindspeed_kernels.reference.flash_attention import check_flash_attention

LIBRARY = Path(__file__).resolve().parent.parent / "_ascendc.so"

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_HALF = _TYPES[1:]
_MAX_HIDDEN = 24 << 10  # kRmsNormMaxHidden of csrc/ascend/kernels/rms_norm_tiling.h
_MAX_ROTARY_DIM, _MAX_HEAD_DIM = 1024, 2048  # kRotaryMaxDim of rotary_tiling.h; one head has to fit besides
MAX_ATTENTION_DIM = {torch.float32: 592, torch.bfloat16: 720, torch.float16: 720}  # flash_attention_tiling.h, backward
_MAX_STRIDE = 65535  # kMaxMatrixStride of tiling.h


def require() -> None:
    """Raise an ImportError that says how to build the kernels, if they are not there."""
    if not LIBRARY.exists():
        raise ImportError(
            f"MINDSPEED_NPU_IMPL asks for ascendc, but there is no {LIBRARY}: it was built without CANN. To build it, "
            "source CANN's set_env.sh, which sets ASCEND_HOME_PATH, and in the directory of the sources run: "
            "pip install --no-build-isolation --no-deps ."
        )


@functools.cache
def table() -> Mapping[str, Implementation]:
    """The kernels, none where they are not built."""
    if not LIBRARY.exists():
        return {}
    torch.ops.load_library(str(LIBRARY))
    torch.get_device_module("npu").config.allow_internal_format = False  # kernels read what strides say
    return {op: Implementation(takes, _kernel(op)) for op, takes in _TAKES.items()}


def _kernel(op: str) -> Any:
    kernel = torch.library.get_kernel(f"mindspeed::{op}", "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return functools.partial(kernel.call_boxed, keys)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, round_before_weight: bool) -> bool:
    sizes = x.dim() > 0 and x.numel() > 0 and x.shape[-1] <= _MAX_HIDDEN
    if not sizes or x.dtype not in _TYPES:
        return False
    if weight is None:
        return True
    wide = torch.promote_types(x.dtype, weight.dtype) if round_before_weight else x.dtype
    return weight.shape == x.shape[-1:] and weight.dtype in _TYPES and wide in (x.dtype, torch.float32)


def _add_rms_norm(x: Tensor, residual: Tensor, *options: Any) -> bool:
    return residual.dtype == x.dtype and residual.shape == x.shape and _rms_norm(x, *options)


def _rms_norm_backward(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    round_before_weight: bool,
    weight_gradient: bool,
) -> bool:
    return grad_y.dtype in (x.dtype, torch.float32) and _rms_norm(x, weight, 0.0, zero_centered, round_before_weight)


def _swiglu(gate: Tensor, up: Tensor | None) -> bool:
    if gate.dtype not in _TYPES or gate.numel() == 0 or gate.dim() == 0:
        return False
    return gate.shape[-1] % 2 == 0 if up is None else (up.shape == gate.shape and up.dtype == gate.dtype)


def _swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor | None) -> bool:
    return _swiglu(gate, up) and grad_y.dtype == gate.dtype


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape and q.dtype == k.dtype):
        return False
    batch, _, seq, head_dim = q.shape
    angles, positions, rotary_dim = cos.shape
    types = q.dtype in _TYPES and cos.dtype in (q.dtype, *_TYPES[:1], *(_HALF if q.dtype == torch.float32 else ()))
    sizes = 0 < rotary_dim <= min(head_dim, _MAX_ROTARY_DIM) and rotary_dim % 2 == 0 and head_dim <= _MAX_HEAD_DIM
    fits = (k.shape[0], *k.shape[2:]) == (batch, seq, head_dim) and positions == seq and angles in (1, batch)
    return types and sizes and fits and q.numel() > 0 and k.numel() > 0 and cos.dtype == sin.dtype


def _rotary_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_dtype: torch.dtype
) -> bool:
    return _rotary(grad_q, grad_k, cos, sin, interleaved) and q_dtype in (grad_q.dtype, *_HALF)


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    query_offsets: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> bool:
    check_flash_attention(q, k, v, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, query_offsets)
    heads, dim = max(q.shape[-2], k.shape[-2]), max(q.shape[-1], v.shape[-1])
    small = dim <= MAX_ATTENTION_DIM.get(q.dtype, 0) and heads * dim <= _MAX_STRIDE
    return small and all(t.numel() > 0 for t in (q, k, v))


def _flash_attention_backward(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *options: Any,
) -> bool:
    return grad_out.dtype == q.dtype and _flash_attention(q, k, v, *options)


def _grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> bool:
    return (
        x.dim() == 2
        and weight.dim() == 3
        and x.shape[1] == weight.shape[1 if transposed else 2]
        and x.dtype == weight.dtype
        and x.dtype in _TYPES
        and offsets.shape == weight.shape[:1]
        and x.numel() > 0
        and weight.numel() > 0
        and max(weight.shape[1:]) <= _MAX_STRIDE
    )


def _grouped_gemm_weight_gradient(grad_y: Tensor, x: Tensor, offsets: Tensor, transposed: bool) -> bool:
    return (
        grad_y.dim() == x.dim() == 2
        and len(grad_y) == len(x)
        and grad_y.dtype == x.dtype
        and x.dtype in _TYPES
        and offsets.dim() == 1
        and min(len(x), len(offsets), x.shape[1], grad_y.shape[1]) > 0
        and max(grad_y.shape[1], x.shape[1]) <= _MAX_STRIDE
    )


def _moe_permute(x: Tensor, expert_index: Tensor, num_experts: int) -> bool:
    return (
        x.dim() == expert_index.dim() == 2
        and len(x) == len(expert_index)
        and x.dtype in _TYPES
        and x.numel() > 0
        and expert_index.numel() > 0
        and expert_index.dtype in (torch.int32, torch.int64)
    )


def _moe_unpermute(y_sorted: Tensor, source: Tensor, weights: Tensor | None, top_k: int) -> bool:
    return (
        y_sorted.dim() == 2
        and y_sorted.dtype in _TYPES
        and y_sorted.numel() > 0
        and source.shape == y_sorted.shape[:1]
        and source.dtype == torch.int64
        and top_k > 0
        and len(source) % top_k == 0
        and (weights is None or (weights.shape == (len(source) // top_k, top_k) and weights.dtype in _TYPES))
    )


def _moe_unpermute_backward(
    grad: Tensor, y_sorted: Tensor | None, source: Tensor, weights: Tensor | None, top_k: int
) -> bool:
    if weights is None:
        return grad.dtype in _TYPES and grad.numel() > 0
    return y_sorted is not None and grad.dtype == y_sorted.dtype and _moe_unpermute(y_sorted, source, weights, top_k)


_TAKES: Mapping[str, Callable[..., bool]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "rotary": _rotary,
    "rotary_backward": _rotary_backward,
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "flash_attention_forward": _flash_attention,
    "flash_attention_backward": _flash_attention_backward,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_weight_gradient": _grouped_gemm_weight_gradient,
    "moe_permute": _moe_permute,
    "moe_unpermute": _moe_unpermute,
    "moe_unpermute_backward": _moe_unpermute_backward,
}
