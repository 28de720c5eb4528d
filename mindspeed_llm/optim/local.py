"""Parameters, gradients and optimizer states as this rank holds them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
