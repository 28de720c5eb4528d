"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from torch import Tensor

from mindspeed_kernels import reference


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, in float32 with one rounding.

    Args:
        gate: ``[..., intermediate]``, or ``[..., 2 * intermediate]`` = ``[gate | up]`` when ``up`` is None.
        up: shape and dtype of ``gate``.

    Returns:
        ``[..., intermediate]`` in gate's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    return reference.swiglu(gate, up)
