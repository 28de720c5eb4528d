"""Matrix products of rows sorted by group with one weight for each group: the linear layers of a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import has_kernel


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
    """``y[r] = weight[g] @ x[r]`` for the rows ``offsets[g - 1] <= r < offsets[g]`` of each group.

    Args:
        x: ``[rows, k]``, sorted by group.
        weight: ``[groups, n, k]``, or ``[groups, k, n]`` when ``transposed``; dtype of ``x``. Views that transpose the
            last two dimensions cost no copy.
        offsets: ``[groups]``, int32 or int64: where the rows of each group end. Groups may be empty.

    Returns:
        ``[rows, n]`` in x's dtype: float32 sums, rounded once. Rows past the last offset are 0, and so are their
        gradients.

    Raises:
        RuntimeError: shapes or dtypes do not fit together, or the offsets do not ascend within the rows.
    """
    if not has_kernel(x, weight, call=("grouped_gemm", x, weight, offsets, transposed)):
        return reference.grouped_gemm(x, weight, offsets, transposed=transposed)
    return torch.ops.mindspeed.grouped_gemm(x, weight, offsets, transposed)


@torch.library.register_fake("mindspeed::grouped_gemm")
def _(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@torch.library.register_fake("mindspeed::grouped_gemm_weight_gradient")
def _(grad_y: Tensor, x: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    n, k = grad_y.shape[1], x.shape[1]
    return x.new_empty(offsets.shape[0], *((k, n) if transposed else (n, k)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, offsets)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.mindspeed.grouped_gemm(grad_y, weight, offsets, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        grad_weight = torch.ops.mindspeed.grouped_gemm_weight_gradient(grad_y, x, offsets, ctx.transposed)
    return grad_x, grad_weight, None, None


def _setup_weight_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_y, x, offsets, ctx.transposed = inputs
    ctx.save_for_backward(grad_y, x, offsets)


def _backward_weight_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The weight's gradient is linear in ``grad_y`` and ``x``; its own gradient has the shape of a weight."""
    grad_y, x, offsets = ctx.saved_tensors
    return (
        torch.ops.mindspeed.grouped_gemm(x, grad, offsets, ctx.transposed),
        torch.ops.mindspeed.grouped_gemm(grad_y, grad, offsets, not ctx.transposed),
        None,
        None,
    )


torch.library.register_autograd("mindspeed::grouped_gemm", _backward, setup_context=_setup)
torch.library.register_autograd(
    "mindspeed::grouped_gemm_weight_gradient", _backward_weight_gradient, setup_context=_setup_weight_gradient
)
