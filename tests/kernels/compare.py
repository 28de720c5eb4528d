"""Holds an operator and its gradients against the reference in float64, within what the dtypes' rounding allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_EPS = torch.finfo(torch.float32).eps


def assert_close(
    actual: Tensor,
    expected: Tensor,
    name: str,
    *,
    roundings: int = 1,
    scale: float | Tensor | None = None,
    terms: bool | Tensor = False,
) -> None:
    """Compare with a float64 result.

    Args:
        roundings: how often the formula rounds to actual's dtype: each time by half a unit in the last place.
        scale: the size of what was added up to the elements, or to each, to which float32's errors are relative: terms
            may cancel. By default the largest element.
        terms: whether the terms were rounded to actual's dtype as well as their sum; or the size of those that were.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} instead of {expected.shape}"
    if actual.numel() == 0:
        return
    assert actual.isfinite().all(), f"{name} is not finite"
    scale = expected.abs().max().item() if scale is None else scale
    terms = scale if terms is True else terms
    limits = torch.finfo(actual.dtype)
    half_unit = limits.eps / 2
    rounding = roundings * half_unit * (expected.abs() + terms)
    allowed = 16 * FLOAT32_EPS * scale + rounding + half_unit * limits.tiny  # the last for subnormal numbers
    error = (actual.double() - expected).abs()
    worst = int((error - allowed).argmax())
    assert (error <= allowed).all(), (
        f"{name} ({actual.dtype}): error {error.flatten()[worst]:.3e} at element {worst}, "
        f"allowed {allowed.flatten()[worst]:.3e}"
    )


def gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The outputs of ``function(*inputs)`` and the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(o.detach() for o in outputs), torch.autograd.grad(outputs, leaves, grad_outputs)


def in_double(function: Callable[..., Any], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]):
    """The same in float64: what the kernels' results are held against."""
    return gradients(function, [t.double() for t in inputs], [g.double() for g in grad_outputs])


def check_second_derivative(
    function: Callable[..., Any], definition: Callable[..., Any], inputs: Sequence[Tensor]
) -> None:
    """Hold the gradient of a gradient in float32 against that of the definition in float64.

    It is that of Σ |∂L/∂x|², the sum over the inputs x, where L is the sum of the outputs' cubes.
    """

    def penalty(f: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        outputs = f(*leaves)
        loss = sum(o.pow(3).sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    expected = penalty(definition, [t.double() for t in inputs])
    for index, (actual, wanted) in enumerate(zip(penalty(function, inputs), expected, strict=True)):
        assert_close(actual, wanted, f"second derivative of input {index}")


def on_threads(counts: Sequence[int], function: Callable[[], Any]) -> list[Any]:
    """The results of ``function()`` with each number of threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(function())
    finally:
        torch.set_num_threads(before)
    return results


# Views that put a tensor's elements into memory in another way; each returns a tensor equal to its argument.
def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -2).contiguous().transpose(0, -2)


def _columns_of_wider(x: Tensor) -> Tensor:
    return torch.cat((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)), -1)[
        ..., x.shape[-1] : 2 * x.shape[-1]
    ]


def _every_other_column(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]


def _columns_first(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _unaligned(x: Tensor) -> Tensor:
    memory = x.new_full((x.numel() + 1,), torch.nan)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": _transposed,
    "columns_of_wider": _columns_of_wider,
    "every_other_column": _every_other_column,
    "columns_first": _columns_first,
    "unaligned": _unaligned,
}
