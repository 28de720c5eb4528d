"""A language model's head and its loss, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops._common import forbid_gradient, has_kernel, reference_gradients
from mindspeed_kernels.reference.linear_cross_entropy import Reduction


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
    chunk: int | None = None,
) -> Tensor:
    """The cross-entropy of the logits ``x = hidden @ weight.T + bias``, computed a few tokens at a time.

    With ``y = softcap * tanh(x / softcap)``, or ``y = x`` without a softcap, and ``lse = log(sum(exp(y)))`` the loss of
    a token is ::

        lse - (1 - label_smoothing) * y[target] - label_smoothing * mean(y) + z_loss * lse²

    Logits have the dtype of ``hidden``, as those of a linear layer; everything after them is float32, and so are sums
    over tokens, whatever their number and that of the chunks. ``reduction="sum"`` computes the gradients together with
    the loss; ``"none"`` computes the logits again for the gradients, which depend on the losses' own.

    Args:
        hidden: ``[..., hidden_size]``.
        weight: ``[vocabulary, hidden_size]``, dtype of ``hidden``.
        targets: int64 ``[...]``, in ``[0, vocabulary)`` or ``ignore_index``, whose loss is 0.
        bias: ``[vocabulary]``, dtype of ``hidden``.
        reduction: "sum" for the sum over tokens, 0 when there are none; "none" for the loss of each.
        chunk: tokens at a time. By default half of ``hidden_size`` and at least 256, so that their logits take half of
            the memory of the weight.

    Returns:
        float32, a scalar or ``[...]``; float64 for float64.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together, or a target is not in the vocabulary.
    """
    _check(hidden, weight, targets, bias)
    if reduction not in ("sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction must be 'sum' or 'none', not {reduction!r}")
    size = chunk or max(256, hidden.shape[-1] // 2)
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    arguments = (flat, weight, bias, flat_targets, ignore_index, softcap, label_smoothing, z_loss, size)
    if reduction == "none":
        return torch.ops.mindspeed.linear_cross_entropy(*arguments).view(targets.shape)
    gradients = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    return torch.ops.mindspeed.linear_cross_entropy_sum(*arguments, gradients)[0]


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    torch._check(
        weight.dim() == 2 and hidden.dim() >= 1 and hidden.shape[-1] == weight.shape[1],
        lambda: (
            "linear_cross_entropy: hidden [..., hidden_size] and weight [vocabulary, hidden_size] do not fit together: "
            f"hidden is {list(hidden.shape)}, weight {list(weight.shape)}"
        ),
    )
    torch._check(
        targets.shape == hidden.shape[:-1] and targets.dtype == torch.int64,
        lambda: (
            f"linear_cross_entropy: targets must be int64 {list(hidden.shape[:-1])}, an index for each row of hidden, "
            f"but are {targets.dtype} {list(targets.shape)}"
        ),
    )
    torch._check(
        bias is None or bias.shape == weight.shape[:1],
        lambda: f"linear_cross_entropy: bias must be {list(weight.shape[:1])}, but is {list(bias.shape)}",  # type: ignore[union-attr]
    )
    torch._check(
        hidden.dtype == weight.dtype and (bias is None or bias.dtype == hidden.dtype),
        lambda: (
            f"linear_cross_entropy: hidden, weight and bias must have one dtype, but have {hidden.dtype}, "
            f"{weight.dtype}{'' if bias is None else f' and {bias.dtype}'}"
        ),
    )


# ---- The computation, on any device.


def _wide(x: Tensor) -> torch.dtype:
    """Of losses, and of sums over tokens."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Loss:
    """What follows the logits."""

    ignore_index: int
    softcap: float | None
    label_smoothing: float
    z_loss: float

    def __call__(self, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """The losses of some tokens. With ``weight``, the losses' own gradients, the logits become their gradients."""
        options = (self.ignore_index, self.softcap, self.label_smoothing, self.z_loss)
        if has_kernel(logits):
            return torch.ops.mindspeed.cross_entropy_(logits, targets, weight, *options)
        losses = reference.cross_entropy(logits, targets, *options)
        if weight is not None:
            logits.copy_(reference.cross_entropy_gradient(logits, targets, weight, *options))
        return losses


class _WeightGradient:
    """The sum of ``logits_gradient.T @ hidden`` over chunks of tokens, accurate whatever their number.

    Products in half precision are rounded, which their sum must not be. On a CPU a sum that ends in bfloat16 takes one
    byte more than its result, elsewhere float32.
    """

    def __init__(self, weight: Tensor) -> None:
        vocabulary, hidden_size = weight.shape
        self.dtype = weight.dtype
        self.half = weight.dtype in (torch.bfloat16, torch.float16)
        packed = weight.dtype == torch.bfloat16 and has_kernel(weight)
        self.sum = weight.new_empty(weight.shape, dtype=torch.float32 if self.half and not packed else None)
        self.low = torch.zeros_like(self.sum, dtype=torch.uint8) if packed else None
        block = max(256, 2**22 // max(1, hidden_size))  # products of 8 MiB
        self.product = weight.new_empty(min(block, vocabulary) if self.half else 0, hidden_size)

    def add(self, logits_gradient: Tensor, hidden: Tensor, *, first: bool, last: bool) -> None:
        if first and self.sum.dtype == self.dtype:
            torch.mm(logits_gradient.t(), hidden, out=self.sum)
            return
        if not self.half:
            self.sum.addmm_(logits_gradient.t(), hidden)
            return
        for start in range(0, len(self.sum), max(1, len(self.product))):
            rows = slice(start, start + len(self.product))
            product = self.product[: len(self.sum[rows])]
            torch.mm(logits_gradient[:, rows].t(), hidden, out=product)
            if self.low is not None:
                torch.ops.mindspeed.add_to_bfloat16_sum_(self.sum[rows], self.low[rows], product, last)
            elif first:
                self.sum[rows] = product
            else:
                self.sum[rows] += product

    def result(self) -> Tensor:
        return self.sum.to(self.dtype)


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss: _Loss,
    chunk: int,
    grad_losses: Tensor | None = None,
    gradients: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All losses, and of hidden, weight and bias the gradients that are asked for; empty tensors for the others."""
    tokens, (vocabulary, _) = len(hidden), weight.shape
    chunks = max(1, -(-tokens // chunk))
    size = max(1, -(-tokens // chunks))  # all about alike

    losses = hidden.new_empty(tokens, dtype=_wide(hidden))
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if gradients[0] else None
    grad_weight = _WeightGradient(weight) if gradients[1] else None
    grad_bias = hidden.new_zeros(vocabulary, dtype=_wide(hidden)) if gradients[2] else None
    memory = hidden.new_empty(min(size, tokens), vocabulary)
    for first in range(0, max(1, tokens), size):  # once for no tokens: gradients of 0
        rows = slice(first, first + size)
        x = hidden[rows]
        logits = memory[: len(x)]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        losses[rows] = loss(logits, targets[rows], None if grad_losses is None else grad_losses[rows])
        if grad_hidden is not None:
            torch.mm(logits, weight, out=grad_hidden[rows])
        if grad_weight is not None:
            grad_weight.add(logits, x, first=first == 0, last=first + size >= tokens)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=_wide(hidden))
    return (
        losses,
        hidden.new_empty(0) if grad_hidden is None else grad_hidden,
        weight.new_empty(0) if grad_weight is None else grad_weight.result(),
        weight.new_empty(0) if grad_bias is None else grad_bias.to(weight.dtype),
    )


_KEY = "CompositeExplicitAutograd"  # the same code for every device


@torch.library.impl("mindspeed::linear_cross_entropy", _KEY)
def _(hidden, weight, bias, targets, ignore_index, softcap, label_smoothing, z_loss, chunk):
    return _compute(hidden, weight, bias, targets, _Loss(ignore_index, softcap, label_smoothing, z_loss), chunk)[0]


@torch.library.impl("mindspeed::linear_cross_entropy_sum", _KEY)
def _(hidden, weight, bias, targets, ignore_index, softcap, label_smoothing, z_loss, chunk, gradients):
    loss = _Loss(ignore_index, softcap, label_smoothing, z_loss)
    ones = hidden.new_ones(len(hidden), dtype=_wide(hidden)) if any(gradients) else None
    losses, *grads = _compute(hidden, weight, bias, targets, loss, chunk, ones, gradients)
    # In float64 the order, which depends on the number of threads, does not show; not every device has it.
    total = losses.sum(dtype=torch.float64).to(losses.dtype) if losses.device.type == "cpu" else losses.sum()
    return total, *grads


@torch.library.impl("mindspeed::linear_cross_entropy_backward", _KEY)
def _(grad_losses, hidden, weight, bias, targets, ignore_index, softcap, label_smoothing, z_loss, chunk, gradients):
    loss = _Loss(ignore_index, softcap, label_smoothing, z_loss)
    return _compute(hidden, weight, bias, targets, loss, chunk, grad_losses.contiguous(), gradients)[1:]


# ---- Shapes for tracing.


def _empty_gradients(hidden: Tensor, weight: Tensor, gradients: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    of_hidden, of_weight, of_bias = (shape if wanted else (0,) for shape, wanted in zip(shapes, gradients, strict=True))
    return hidden.new_empty(of_hidden), weight.new_empty(of_weight), weight.new_empty(of_bias)


@torch.library.register_fake("mindspeed::cross_entropy_")
def _(logits, targets, weight, ignore_index, softcap, label_smoothing, z_loss):
    return logits.new_empty(targets.shape, dtype=torch.float32)


@torch.library.register_fake("mindspeed::add_to_bfloat16_sum_")
def _(high, low, addend, last):
    return None


@torch.library.register_fake("mindspeed::linear_cross_entropy")
def _(hidden, weight, bias, targets, ignore_index, softcap, label_smoothing, z_loss, chunk):
    return hidden.new_empty(targets.shape, dtype=_wide(hidden))


@torch.library.register_fake("mindspeed::linear_cross_entropy_sum")
def _(hidden, weight, bias, targets, ignore_index, softcap, label_smoothing, z_loss, chunk, gradients):
    return hidden.new_empty((), dtype=_wide(hidden)), *_empty_gradients(hidden, weight, gradients)


@torch.library.register_fake("mindspeed::linear_cross_entropy_backward")
def _(grad_losses, hidden, weight, bias, targets, ignore_index, softcap, label_smoothing, z_loss, chunk, gradients):
    return _empty_gradients(hidden, weight, gradients)


# ---- Gradients.


def _reference_gradients(ctx: Any, grad_output: Tensor, reduction: Reduction) -> tuple[Tensor | None, ...]:
    """As a graph that can be differentiated again."""
    hidden, weight, bias, targets = ctx.saved_tensors[:4]
    ignore_index, softcap, label_smoothing, z_loss, _ = ctx.options

    def definition(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return reference.linear_cross_entropy(
            hidden, weight, targets, bias, reduction=reduction, ignore_index=ignore_index, softcap=softcap,
            label_smoothing=label_smoothing, z_loss=z_loss,
        )  # fmt: skip

    return reference_gradients(definition, (hidden, weight, bias), (grad_output,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # create_graph=True
        grads = _reference_gradients(ctx, grad_losses, "none")
    else:
        wanted = list(ctx.needs_input_grad[:3])
        grads = torch.ops.mindspeed.linear_cross_entropy_backward(grad_losses, *ctx.saved_tensors, *ctx.options, wanted)
        grads = tuple(grad if is_wanted else None for grad, is_wanted in zip(grads, wanted, strict=True))
    return *grads, *[None] * 6


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for them
    ctx.save_for_backward(*inputs[:4], *output[1:])
    *ctx.options, ctx.gradients = inputs[4:]


def _backward_sum(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:3]
    if grad_loss is None:
        return (None,) * 10
    if torch.is_grad_enabled():  # create_graph=True
        grads = _reference_gradients(ctx, grad_loss, "sum")
    elif any(n and not computed for n, computed in zip(needed, ctx.gradients, strict=True)):
        raise RuntimeError("mindspeed::linear_cross_entropy_sum: a gradient is needed that was not asked for")
    else:
        pairs = zip(ctx.saved_tensors[4:], needed, strict=True)
        grads = tuple(_scaled(grad, grad_loss) if n else None for grad, n in pairs)
    return *grads, *[None] * 7


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """``factor * grad``, multiplied in float32: on a CPU that is what a scalar factor does, elsewhere it is rounded."""
    if grad.device.type == "cpu":
        return grad * factor
    return (grad.to(factor.dtype) * factor).to(grad.dtype)


torch.library.register_autograd("mindspeed::linear_cross_entropy", _backward, setup_context=_setup)
torch.library.register_autograd("mindspeed::linear_cross_entropy_sum", _backward_sum, setup_context=_setup_sum)
forbid_gradient("linear_cross_entropy_backward")
