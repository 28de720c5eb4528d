"""The Newton–Schulz iteration of Muon."""

from __future__ import annotations

from torch import Tensor


def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
) -> Tensor:
    """In x's own dtype, with whole products; see :func:`mindspeed_kernels.newton_schulz`."""
    a, b, c = coefficients
    y = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        if x.shape[-2] <= x.shape[-1]:
            gram = y @ y.mT
            y = a * y + (b * gram + c * gram @ gram) @ y
        else:
            gram = y.mT @ y
            y = a * y + y @ (b * gram + c * gram @ gram)
    return y
