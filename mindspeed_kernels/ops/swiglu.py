"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients


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
    if not has_kernel(gate, up, call=("swiglu", gate, up)):
        return reference.swiglu(gate, up)
    return torch.ops.mindspeed.swiglu(gate, up)


@torch.library.register_fake("mindspeed::swiglu")
def _(gate: Tensor, up: Tensor | None) -> Tensor:
    *leading, length = gate.shape
    return gate.new_empty(*leading, length // 2 if up is None else length)


@torch.library.register_fake("mindspeed::swiglu_backward")
def _(grad_y: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        return reference_gradients(reference.swiglu, (gate, up), (grad_y,))
    grad_gate, grad_up = torch.ops.mindspeed.swiglu_backward(grad_y, gate, up)
    return grad_gate, None if up is None else grad_up


torch.library.register_autograd("mindspeed::swiglu", _backward, setup_context=_setup)
forbid_gradient("swiglu_backward")
