"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import has_kernel


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of one attention layer by their positions' angles.

    Half-split (Llama, Qwen, …), with ``h = rotary_dim / 2``::

        out[i]     = x[i]     * cos[i]     - x[i + h] * sin[i]
        out[i + h] = x[i + h] * cos[i + h] + x[i]     * sin[i + h]

    Interleaved (GLM, …), using the first half of ``cos`` and ``sin``::

        out[2i]     = x[2i]     * cos[i] - x[2i + 1] * sin[i]
        out[2i + 1] = x[2i + 1] * cos[i] + x[2i]     * sin[i]

    Args:
        q: ``[batch, num_heads, seq, head_dim]``, any strides (transformers passes transposed views).
        k: ``[batch, num_key_value_heads, seq, head_dim]``, dtype of ``q``.
        cos, sin: ``[batch or 1, seq, rotary_dim]`` as transformers builds them (both halves alike), ``rotary_dim`` even
            and at most ``head_dim`` (and 1024). The remaining ``head_dim - rotary_dim`` elements pass unchanged.
        interleaved: pairs are neighbours instead of halves.

    Returns:
        ``(q_out, k_out)`` with the shapes and memory layout of the inputs, in the promoted dtype of ``q`` and ``cos``.
        The sum is formed in float32 and rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    call = ("rotary", q, k, cos, sin, interleaved)
    if not has_kernel(q, k, cos, sin, call=call) or cos.requires_grad or sin.requires_grad:
        return reference.rotary(q, k, cos, sin, interleaved=interleaved)
    return torch.ops.mindspeed.rotary(q, k, cos, sin, interleaved)


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the kernel allocates an output: x's order of dimensions in memory, made contiguous if rows are not dense."""
    dense = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    return torch.empty_like(dense, dtype=dtype)


@torch.library.register_fake("mindspeed::rotary")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return _empty_like(q, dtype), _empty_like(k, dtype)


@torch.library.register_fake("mindspeed::rotary_backward")
def _(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _empty_like(grad_q, q_dtype), _empty_like(grad_k, q_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, cos, sin, ctx.interleaved = inputs
    ctx.q_dtype = q.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        raise RuntimeError("mindspeed::rotary has no gradient for cos and sin; mindspeed_kernels.rotary has")
    cos, sin = ctx.saved_tensors
    grads = torch.ops.mindspeed.rotary_backward(grad_q, grad_k, cos, sin, ctx.interleaved, ctx.q_dtype)
    return *grads, None, None, None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, _ = inputs
    ctx.save_for_backward(cos, sin)


def _backward_of_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    """The operator is linear: the derivative of its gradient is the operator itself."""
    cos, sin = ctx.saved_tensors
    return *torch.ops.mindspeed.rotary(grad_q, grad_k, cos, sin, ctx.interleaved), None, None, None, None


torch.library.register_autograd("mindspeed::rotary", _backward, setup_context=_setup)
torch.library.register_autograd("mindspeed::rotary_backward", _backward_of_backward, setup_context=_setup_backward)
