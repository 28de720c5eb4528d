"""What the vendor's operators share."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def computable(*tensors: Tensor | None) -> bool:
    """One dtype that the vendor's operators have, and something to compute."""
    present = [t for t in tensors if t is not None]
    dtype = present[0].dtype
    return dtype in _DTYPES and all(t.dtype == dtype and t.numel() > 0 for t in present)
