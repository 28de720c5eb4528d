"""npu_grouped_matmul. Its list of groups has to cover all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable

_ONE_TENSOR = 3  # split_item: the result comes as one tensor
_BY_ROWS, _BY_SUMMANDS = 0, 2  # group_type: which dimension of x @ weight is cut into groups
_MAX_WIDTH, _MAX_GROUPS = 65536, 1024


def takes(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> bool:
    return (
        x.dim() == 2
        and weight.dim() == 3
        and x.shape[1] == weight.shape[1 if transposed else 2]
        and computable(x, weight)
        and max(weight.shape[1:]) < _MAX_WIDTH
        and offsets.shape == weight.shape[:1]
        and len(offsets) <= _MAX_GROUPS
    )


def takes_weight_gradient(grad_y: Tensor, x: Tensor, offsets: Tensor, transposed: bool) -> bool:
    return (
        grad_y.dim() == x.dim() == 2
        and len(grad_y) == len(x)
        and computable(grad_y, x)
        and max(grad_y.shape[1], x.shape[1]) < _MAX_WIDTH
        and offsets.dim() == 1
        and 0 < len(offsets) < _MAX_GROUPS
    )


def forward(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    matrices = weight if transposed else weight.mT  # [groups, k, n]
    ends = torch.cat((offsets[:-1], offsets.new_full((1,), len(x)))).long()  # rows left over join the last group
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x], [matrices], group_list=ends, split_item=_ONE_TENSOR, group_type=_BY_ROWS, group_list_type=0
    )
    left_over = torch.arange(len(x), device=x.device) >= offsets[-1]
    return y.masked_fill(left_over.unsqueeze(1), 0)


def weight_gradient(grad_y: Tensor, x: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    left, right = (x, grad_y) if transposed else (grad_y, x)
    ends = torch.cat((offsets, offsets.new_full((1,), len(x)))).long()  # rows left over are a group that is dropped
    (grad,) = torch.ops.npu.npu_grouped_matmul(
        [left.mT], [right], group_list=ends, split_item=_ONE_TENSOR, group_type=_BY_SUMMANDS, group_list_type=0
    )
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0  # it is not documented that these are written
    return grad[:-1].masked_fill(empty[:, None, None], 0)
