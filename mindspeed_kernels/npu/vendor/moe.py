"""npu_moe_token_permute and npu_moe_token_unpermute.

They know each assignment's row, ``position``, where ours know each row's assignment, ``source``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable
from mindspeed_kernels.reference.moe import rows_of_tokens

_MAX_ROWS, _MAX_TOP_K = 2**24 - 1, 512


def takes_permute(x: Tensor, expert_index: Tensor, num_experts: int) -> bool:
    return (
        x.dim() == expert_index.dim() == 2
        and len(x) == len(expert_index)
        and computable(x)
        and 0 < expert_index.numel() < _MAX_ROWS
        and expert_index.shape[1] <= _MAX_TOP_K
        and expert_index.dtype in (torch.int32, torch.int64)
    )


def permute(x: Tensor, expert_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    # Those that are elsewhere are sorted behind all others.
    expert = expert_index.masked_fill((expert_index < 0) | (expert_index >= num_experts), num_experts)
    rows, position = torch.ops.npu.npu_moe_token_permute(x, expert, expert.numel())
    every = torch.arange(expert.numel(), device=x.device)
    source = torch.empty_like(every).scatter_(0, position.long(), every)
    per_expert = (expert.reshape(-1, 1) == torch.arange(num_experts, device=x.device)).sum(0)
    offsets = per_expert.cumsum(0).to(torch.int32)
    left_over = every >= (offsets[-1] if num_experts else 0)
    return rows.masked_fill(left_over.unsqueeze(1), 0), offsets, source.masked_fill(left_over, -1)


def takes_unpermute(y_sorted: Tensor, source: Tensor, weights: Tensor | None, top_k: int) -> bool:
    return (
        y_sorted.dim() == 2
        and computable(y_sorted, weights)
        and source.shape == y_sorted.shape[:1]
        and len(source) < _MAX_ROWS
        and 0 < top_k <= _MAX_TOP_K
        and len(source) % top_k == 0
        and (weights is None or weights.shape == (len(source) // top_k, top_k))
    )


def unpermute(y_sorted: Tensor, source: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    rows, position = _rows_and_positions(y_sorted, source)
    return torch.ops.npu.npu_moe_token_unpermute(rows, position, _weights(y_sorted, weights, top_k))


def takes_unpermute_backward(
    grad: Tensor, y_sorted: Tensor | None, source: Tensor, weights: Tensor | None, top_k: int
) -> bool:
    if weights is None:
        return computable(grad)
    return y_sorted is not None and takes_unpermute(y_sorted, source, weights, top_k) and grad.dtype == weights.dtype


def unpermute_backward(
    grad: Tensor, y_sorted: Tensor | None, source: Tensor, weights: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    if weights is None or y_sorted is None:  # a row's gradient is its token's
        return rows_of_tokens(grad, source, top_k), grad.new_empty(0, top_k, dtype=torch.float32)
    rows, position = _rows_and_positions(y_sorted, source)
    grad_rows, grad_weights = torch.ops.npu.npu_moe_token_unpermute_grad_v2(
        grad.contiguous(), position, len(rows), rows.dtype, weights.contiguous(), permuted_tokens=rows
    )
    return grad_rows.masked_fill((source < 0).unsqueeze(1), 0), grad_weights


def _weights(y_sorted: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """Without any the vendor's operator takes top_k to be 1."""
    return y_sorted.new_ones(len(y_sorted) // top_k, top_k) if weights is None else weights


def _rows_and_positions(y_sorted: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Each assignment's row. There are as many rows without an assignment, which are 0 here, as there are assignments
    without a row: the latter get the former."""
    unused = source < 0
    every = torch.arange(len(source), device=source.device)
    known = torch.full_like(every, -1)
    known = torch.cat((known, known[:1])).scatter_(0, source.masked_fill(unused, len(source)), every)[:-1]
    missing = known < 0
    free = torch.sort(unused.int(), descending=True, stable=True).indices  # the unused rows first
    position = torch.where(missing, free[(missing.cumsum(0) - 1).clamp_min(0)], known)
    return y_sorted.masked_fill(unused.unsqueeze(1), 0), position.to(torch.int32)
