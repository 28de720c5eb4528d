"""npu_moe_gating_top_k_softmax, for the choice of experts alone: their weights are taken from PyTorch's softmax, which
has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable


def takes(logits: Tensor, top_k: int) -> bool:
    return logits.dim() == 2 and computable(logits) and 0 < top_k <= min(1024, logits.shape[1])


def largest(logits: Tensor, top_k: int) -> Tensor:
    """The indices of the ``top_k`` largest of each row, the largest first. Which of equal ones comes first is the
    vendor's affair."""
    return torch.ops.npu.npu_moe_gating_top_k_softmax(logits, None, top_k)[1].long()
