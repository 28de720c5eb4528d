"""A linear layer and the cross-entropy of its outputs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kernels.reference._common import widened

Reduction = Literal["sum", "none"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "sum",
    ignore_index: int = -100,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The cross-entropy of ``hidden @ weight.T + bias``; see :func:`mindspeed_kernels.linear_cross_entropy`."""
    logits = F.linear(widened(hidden), widened(weight), None if bias is None else widened(bias))
    logits, flat_targets = logits.flatten(0, -2), targets.flatten()
    losses = cross_entropy(logits, flat_targets, ignore_index, softcap, label_smoothing, z_loss)
    return losses.sum() if reduction == "sum" else losses.view(targets.shape)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each row of logits ``[tokens, vocabulary]``."""
    logits = _capped(widened(logits), softcap)
    losses = F.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    if z_loss:
        losses = losses + z_loss * torch.where(targets == ignore_index, 0.0, logits.logsumexp(-1).square())
    return losses


def cross_entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    ignore_index: int = -100,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """``weight`` ``[tokens]`` times the gradients of the rows' losses with respect to their own logits."""
    y = _capped(widened(logits), softcap)
    counts = targets != ignore_index
    lse = y.logsumexp(-1, keepdim=True)
    gradient = y.softmax(-1) * (1 + 2 * z_loss * lse) - label_smoothing / y.shape[-1]
    gradient.scatter_add_(1, torch.where(counts, targets, 0)[:, None], torch.full_like(lse, label_smoothing - 1))
    if softcap is not None:
        gradient *= 1 - (y / softcap).square()
    return torch.where(counts[:, None], gradient * weight[:, None], 0.0)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
