"""Half-precision conversion in the kernels, exhaustively: elements that rotary passes through are loaded and stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_kernels import _C

HALVES = [torch.bfloat16, torch.float16]


def passed_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [elements], loaded from its dtype and stored in ``dtype`` by a kernel that changes nothing."""
    no_angles = torch.empty(1, 1, 0, dtype=torch.promote_types(x.dtype, dtype))
    rows, none = x.view(1, 1, 1, -1), x.new_empty(1, 0, 1, x.numel())
    backward = torch.ops.mindspeed.rotary_backward if x.dtype != dtype else None
    if backward is None:
        return torch.ops.mindspeed.rotary(rows, none, no_angles, no_angles, False)[0].flatten()
    return backward(rows, none, no_angles, no_angles, False, dtype)[0].flatten()


def same(actual: Tensor, expected: Tensor, source: Tensor) -> bool:
    """Equal to the sign of 0, NaN for NaN. The bfloat16 instruction, by specification, makes 0 of subnormals."""
    equal = (actual == expected) & (actual.signbit() == expected.signbit())
    both_nan = actual.isnan() & expected.isnan()
    flushed = torch.zeros_like(equal)
    if actual.dtype == torch.bfloat16 and _C.cpu_capability() in ("avx512_bf16", "amx"):
        flushed = (source.float().abs() < torch.finfo(torch.float32).tiny) & (actual == 0)
    return bool((equal | both_nan | flushed).all())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("unaligned_tail", [0, 5])
def test_every_half_precision_number_survives(dtype: torch.dtype, unaligned_tail: int) -> None:
    x = torch.arange(-(2**15), 2**15 - unaligned_tail, dtype=torch.int32).to(torch.int16).view(dtype)
    assert same(passed_through(x, dtype), x, x)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Random bits, and around every half-precision number the float32 numbers where rounding changes direction."""
    torch.manual_seed(0)
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = (numbers[:-1].double() + numbers[1:].double()).div(2).float()
    around = [torch.nextafter(between, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    random = torch.randint(-(2**31), 2**31 - 1, (2**18,)).to(torch.int32).view(torch.float32)
    edges = torch.tensor([65519.99, 65520.0, 3.3895e38, 3.4e38, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    x = torch.cat((numbers, between, *around, random, edges))
    all_ones = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaN that a carry would destroy
    x = torch.cat((x, all_ones))
    assert same(passed_through(x, dtype), x.to(dtype), x)
