"""AdamW, and the random numbers of its stochastic rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_kernels.reference._common import widened


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    copies: Sequence[Tensor] = (),
    rounding_seed: int | None = None,
) -> None:
    """One step of AdamW, in place; see :func:`mindspeed_kernels.adamw_step_`."""
    _check_adamw(params, grads, exp_avgs, exp_avg_sqs, steps, copies)
    for i, (param, step) in enumerate(zip(params, steps, strict=True)):
        wide = widened(param)
        grad = grads[i].to(wide.dtype) * grad_scale
        mean = exp_avgs[i].lerp_(grad, 1 - beta1)
        square = exp_avg_sqs[i].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt() / (1 - beta2**step) ** 0.5
        new = wide - wide * (lr * weight_decay) - lr / (1 - beta1**step) * mean / (root + eps)
        if param.dtype == torch.bfloat16 and rounding_seed is not None:
            new = _round_stochastically(new, rounding_seed, i)
        param.copy_(new)
        if copies:
            copies[i].copy_(new)


def _round_stochastically(x: Tensor, seed: int, index: int) -> Tensor:
    """float32 with all bits cleared that bfloat16 lacks, after adding random ones to them: rounded up or down."""
    key = _scramble(seed + (index + 1) * 0x9E3779B97F4A7C15)
    element = torch.arange(x.numel(), device=x.device).view(x.shape)
    low, high = element & 0xFFFFFFFF, element >> 32
    random = _hash(_hash(low ^ (key & 0xFFFFFFFF)) ^ (((key >> 32) + high) & 0xFFFFFFFF)) >> 16
    bits = (x.contiguous().view(torch.int32) + random.to(torch.int32)) & -0x10000
    return torch.where(x.isnan(), x, bits.view(torch.float32))


def _hash(x: Tensor) -> Tensor:
    """Wellons' lowbias32 on 32 bits held in int64, whose products wrap around as those of 32 bits do."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _scramble(x: int) -> int:
    """The finalizer of SplitMix64."""
    mask = 2**64 - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _check_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    copies: Sequence[Tensor],
) -> None:
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "copies": copies or params}
    for name, entries in (*lists.items(), ("steps", steps)):
        torch._check(
            len(entries) == len(params),
            lambda name=name, entries=entries: (
                f"adamw_step_: {name} must have an entry for each of the {len(params)} params, but has {len(entries)}"
            ),
        )
    for name, tensors in lists.items():
        for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            torch._check(
                tensor.shape == param.shape,
                lambda name=name, i=i, tensor=tensor, param=param: (
                    f"adamw_step_: {name}[{i}] must have the shape of params[{i}] {list(param.shape)}, but has "
                    f"{list(tensor.shape)}"
                ),
            )
    for i, step in enumerate(steps):
        torch._check(
            step >= 1,
            lambda i=i, step=step: f"adamw_step_: steps[{i}] must count this step, the first being 1, but is {step}",
        )
