from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """``x`` in the type that the arithmetic is done in: float64 for float64, float32 for all others."""
    torch._check(x.is_floating_point(), lambda: f"tensors of a floating dtype are needed, but one is {x.dtype}")
    return x if x.dtype == torch.float64 else x.float()
