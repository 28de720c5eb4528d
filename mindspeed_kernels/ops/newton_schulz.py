"""Orthogonalization by the Newton–Schulz iteration of Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

Two of the three products of a step are symmetric, so that little more than half of each is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.ops._common import has_kernel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
) -> Tensor:
    """An approximation of ``U Vᵀ`` for the singular value decomposition ``x = U S Vᵀ`` of each matrix.

    With ``y = x / ‖x‖``, repeated ``steps`` times: ``a, b, c = coefficients; A = y yᵀ; y = a y + (b A + c A²) y``. The
    singular values come out between about 0.7 and 1.2, whatever they were.

    Args:
        x: ``[..., rows, columns]``; each matrix of a stack by itself. A matrix of zeros gives zeros.
        dtype: of the products; bfloat16 is enough.

    Returns:
        A tensor of x's shape in ``dtype``.
    """
    if x.dim() < 2:
        raise ValueError(f"newton_schulz: x must be [..., rows, columns], but is {list(x.shape)}")
    a, b, c = coefficients
    wide = x.shape[-2] <= x.shape[-1]
    y = (x if wide else x.mT).reshape(-1, min(x.shape[-2:]), max(x.shape[-2:])).float()
    y = (y / y.norm(dim=(-2, -1), keepdim=True).clamp_min(eps)).to(dtype)  # also the spectral norm is at most 1
    for _ in range(steps):
        gram = _symmetric_product(y)
        y = torch.baddbmm(y, _symmetric_product(gram, gram, alpha=c, beta=b), y, beta=a)
    y = y if wide else y.mT
    return y.reshape(x.shape)


def _symmetric_product(y: Tensor, x: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """``alpha * y @ y.mT + beta * x`` for symmetric x; ``y`` is ``[batch, rows, columns]``."""
    if has_kernel(y):
        return torch.ops.mindspeed.symmetric_product(y, x, alpha, beta)
    out = y.new_empty(len(y), y.shape[1], y.shape[1])
    _fill_symmetric(out, out if x is None else x, y, y.mT, beta=beta, alpha=alpha)
    return out


def _fill_symmetric(out: Tensor, x: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> None:
    """``out = beta * x + alpha * left @ right`` for symmetric x and product, all of them batches.

    Of two by two blocks the upper right one is the transpose of the lower left one, and the diagonal ones are symmetric
    themselves: three levels leave 9/16 of the work.
    """
    size = out.shape[-1]
    if size <= 256:
        out.copy_(torch.baddbmm(x, left, right, beta=beta, alpha=alpha))
        return
    half = size // 2
    first, second = slice(half), slice(half, size)
    for rows, columns in ((first, first), (second, first), (second, second)):
        block = (out[:, rows, columns], x[:, rows, columns], left[:, rows], right[:, :, columns])
        if rows == columns:
            _fill_symmetric(*block, beta=beta, alpha=alpha)
        else:
            block[0].copy_(torch.baddbmm(*block[1:], beta=beta, alpha=alpha))
    out[:, first, second] = out[:, second, first].mT


@torch.library.register_fake("mindspeed::symmetric_product")
def _(y: Tensor, x: Tensor | None, alpha: float, beta: float) -> Tensor:
    return y.new_empty(y.shape[0], y.shape[1], y.shape[1])
