"""One weight for each expert, times the rows sorted by expert."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed_kernels
from benchmarks.case import OURS, Case, Problem, Work


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, experts, n, k in ((8192, 8, 1024, 1024), (16384, 64, 1536, 2048)):
            if dtype == torch.float32 and experts > 8:
                continue
            product = Work(flops=2 * rows * n * k)
            yield Case(
                "grouped_gemm",
                f"{rows} rows, E {experts}, {n}x{k}",
                dtype,
                forward=product,
                backward=product + product,
                build=partial(problem, rows, experts, n, k, dtype),
            )


def problem(rows: int, experts: int, n: int, k: int, dtype: torch.dtype) -> Problem:
    x = torch.randn(rows, k, dtype=dtype, requires_grad=True)
    weight = torch.randn(experts, n, k, dtype=dtype, requires_grad=True)
    expert = torch.randint(experts, (rows,))
    offsets = torch.bincount(expert, minlength=experts).cumsum(0, dtype=torch.int32)
    return Problem(
        arguments=(x, weight, offsets),
        leaves=[x, weight],
        contestants={"F.grouped_mm": _torch, "matmul of each expert": _loop, OURS: mindspeed_kernels.grouped_gemm},
    )


def _torch(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.mT, offs=offsets)


def _loop(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    rows = x.tensor_split(offsets[:-1].long())
    return torch.cat([part @ w.T for part, w in zip(rows, weight, strict=True)])
