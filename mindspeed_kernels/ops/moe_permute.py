"""Sort tokens by the expert they are routed to, and bring the experts' outputs back together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients
from mindspeed_kernels.reference.moe import rows_of_tokens


def moe_permute(x: Tensor, expert_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each expert that it is routed to, the copies sorted by expert.

    The order within an expert is that of ``expert_index`` in memory. Entries outside ``[0, num_experts)``, experts that
    another rank holds, are skipped.

    Args:
        x: ``[tokens, hidden]``.
        expert_index: ``[tokens, top_k]``, int32 or int64, top_k at most 64.

    Returns:
        ``x_sorted`` ``[tokens * top_k, hidden]``, zeros in the rows past the last offset;
        ``offsets`` ``[num_experts]``, int32: where the rows of each expert end;
        ``source`` ``[tokens * top_k]``, int64: each row's flat index into ``expert_index``, -1 past the last offset.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    if not has_kernel(x, call=("moe_permute", x, expert_index, num_experts)):
        return reference.moe_permute(x, expert_index, num_experts)
    return torch.ops.mindspeed.moe_permute(x, expert_index, num_experts)


def moe_unpermute(
    y_sorted: Tensor, source: Tensor, weights: Tensor | None = None, *, top_k: int | None = None
) -> Tensor:
    """The weighted sum of each token's rows: ``out[t] = sum_j weights[t, j] * y_sorted[row of assignment (t, j)]``.

    Args:
        y_sorted: ``[tokens * top_k, hidden]``, in :func:`moe_permute`'s order; rows whose source is -1 are ignored.
        source: as :func:`moe_permute` returned it.
        weights: ``[tokens, top_k]``, any floating dtype; None for ones.
        top_k: needed without weights.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``y_sorted``: a float32 sum, rounded once.

    Raises:
        RuntimeError: shapes or dtypes do not fit together, or source names an assignment twice.
    """
    if weights is not None:
        top_k = weights.shape[-1]
    if top_k is None:
        raise ValueError("moe_unpermute: top_k is needed without weights")
    if not has_kernel(y_sorted, weights, call=("moe_unpermute", y_sorted, source, weights, top_k)):
        return reference.moe_unpermute(y_sorted, source, weights, top_k=top_k)
    return torch.ops.mindspeed.moe_unpermute(y_sorted, source, weights, top_k)


@torch.library.register_fake("mindspeed::moe_permute")
def _(x: Tensor, expert_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = expert_index.shape[0] * expert_index.shape[1]
    return (
        x.new_empty(rows, x.shape[1]),
        x.new_empty(num_experts, dtype=torch.int32),
        x.new_empty(rows, dtype=torch.int64),
    )


@torch.library.register_fake("mindspeed::moe_unpermute")
def _(y_sorted: Tensor, source: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    return y_sorted.new_empty(y_sorted.shape[0] // top_k, y_sorted.shape[1])


@torch.library.register_fake("mindspeed::moe_unpermute_backward")
def _(
    grad: Tensor, y_sorted: Tensor | None, source: Tensor, weights: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    grad_y_sorted = grad.new_empty(grad.shape[0] * top_k, grad.shape[1])
    if weights is None:
        return grad_y_sorted, grad.new_empty(0, top_k, dtype=torch.float32)
    return grad_y_sorted, weights.new_empty(weights.shape)


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, offsets, source = output
    ctx.top_k = inputs[1].shape[1]
    ctx.mark_non_differentiable(offsets, source)
    ctx.save_for_backward(source)


def _backward_permute(ctx: Any, grad: Tensor, grad_offsets: None, grad_source: None) -> tuple[Tensor | None, ...]:
    (source,) = ctx.saved_tensors
    return torch.ops.mindspeed.moe_unpermute(grad, source, None, ctx.top_k), None, None


def _setup_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_sorted, source, weights, ctx.top_k = inputs
    ctx.save_for_backward(None if weights is None else y_sorted, source, weights)


def _backward_unpermute(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y_sorted, source, weights = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        if weights is None:
            return rows_of_tokens(grad, source, ctx.top_k), None, None, None

        def combine(y_sorted: Tensor, weights: Tensor) -> Tensor:
            return reference.moe_unpermute(y_sorted, source, weights, top_k=ctx.top_k)

        grad_y, grad_weights = reference_gradients(combine, (y_sorted, weights), (grad,))
        return grad_y, None, grad_weights, None
    grad_y, grad_weights = torch.ops.mindspeed.moe_unpermute_backward(grad, y_sorted, source, weights, ctx.top_k)
    return grad_y, None, None if weights is None else grad_weights, None


torch.library.register_autograd("mindspeed::moe_permute", _backward_permute, setup_context=_setup_permute)
torch.library.register_autograd("mindspeed::moe_unpermute", _backward_unpermute, setup_context=_setup_unpermute)
forbid_gradient("moe_unpermute_backward")
