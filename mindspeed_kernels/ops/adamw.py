"""One step of AdamW (Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101) over many parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_kernels import reference
from mindspeed_kernels.ops import _common


@torch.no_grad()
def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_scale: float = 1.0,
    copies: Sequence[Tensor] | None = None,
    rounding_seed: int | None = None,
) -> None:
    """Update all parameters of a group in place, in one pass over memory, as ``torch.optim.AdamW`` does::

        g = grad_scale * grad
        exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g²
        param = param - lr * weight_decay * param
        param = param - lr / (1 - beta1**step) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps)

    Args:
        params: float32 master weights or bfloat16 weights.
        grads: for each parameter, float32, bfloat16 or float16. They are only read.
        exp_avgs, exp_avg_sqs: the moments, float32.
        steps: for each parameter the number of its updates, this one included: 1 for the first.
        grad_scale: what gradients are multiplied by first, such as a clip coefficient.
        copies: bfloat16 tensors that receive the new float32 parameters, rounded.
        rounding_seed: round bfloat16 parameters up or down at random, so that updates too small for a rounding to
            nearest add up on average. The random numbers are a function of the seed, the parameter's place in the list
            and the element's index: give each step another seed.

    Raises:
        RuntimeError: lists, shapes, dtypes or steps do not fit together.
    """
    copies = () if copies is None else copies
    in_place = (*params, *exp_avgs, *exp_avg_sqs, *copies)
    if not has_kernel(in_place, grads):
        reference.adamw_step_(
            params, grads, exp_avgs, exp_avg_sqs, steps,
            lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            grad_scale=grad_scale, copies=copies, rounding_seed=rounding_seed,
        )  # fmt: skip
        return
    torch.ops.mindspeed.adamw_step_(
        params, grads, exp_avgs, exp_avg_sqs, copies, steps, lr, beta1, beta2, eps, weight_decay, grad_scale,
        rounding_seed,
    )  # fmt: skip
    if not torch.compiler.is_compiling():  # a graph that saved one of them must not go on to use it
        torch.autograd.graph.increment_version(in_place)


def has_kernel(in_place: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether a kernel updates these parameters, moments and copies; otherwise the reference does.

    There is none for no tensors at all, for float64 and for tensors in another memory order than their elements'.
    """
    return len(in_place) > 0 and _common.has_kernel(*in_place, *grads) and all(t.is_contiguous() for t in in_place)


@torch.library.register_fake("mindspeed::adamw_step_")
def _(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    steps: list[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    rounding_seed: int | None,
) -> None:
    return None
