"""What the operators' Python sides share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.npu import dispatch as npu

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def has_kernel(*tensors: Tensor | None, call: tuple[Any, ...] = ()) -> bool:
    """Whether fused kernels take these arguments; otherwise the reference computes them.

    ``call`` is what runs: an operator of ``torch.ops.mindspeed`` by name, and its arguments. On an NPU it depends on
    all of them.
    """
    if call and npu.on_npu(call[1]):
        return npu.takes(*call)
    return all(t is None or (t.device.type == "cpu" and t.dtype in KERNEL_DTYPES) for t in tensors)


def on_host(tensor: Tensor | None) -> Tensor | None:
    """What a kernel reads while it is set up lies in the host's memory."""
    return None if tensor is None else tensor.cpu()


def reference_gradients(
    reference: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of ``reference(*inputs)`` as a graph that can be differentiated again, None for constant inputs.

    An operator's backward takes this way when its caller asks for ``create_graph=True``: kernels have no second
    derivative, the reference has all of them.
    """
    outputs = reference(*inputs)
    pairs = zip(outputs if isinstance(outputs, tuple) else (outputs,), grad_outputs, strict=True)
    # Not every output depends on every input: with constants alone, it has no graph.
    used = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if not used:
        return tuple(torch.zeros_like(t) if t is not None and t.requires_grad else None for t in inputs)
    found = iter(
        torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used], create_graph=True, allow_unused=True)
    )
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


def forbid_gradient(op: str) -> None:
    """Make ``torch.ops.mindspeed.<op>``, itself a gradient, raise when it is differentiated."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"mindspeed::{op} has no derivative of its own. For second derivatives call mindspeed_kernels."
            f"{op.removesuffix('_backward')} and torch.autograd.grad(..., create_graph=True)."
        )

    torch.library.register_autograd(f"mindspeed::{op}", backward)
