"""The AscendC rotary embedding on the twin against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_kernels import reference
from tests.ascend.native import kernels
from tests.kernels.compare import KERNEL_DTYPES, assert_close, in_double


def angles(batch: int, seq: int, rotary_dim: int, dtype: torch.dtype, *, alike: bool = True) -> tuple[Tensor, Tensor]:
    """cos and sin as transformers builds them, or with halves that differ."""
    theta = torch.randn(batch, seq, rotary_dim // 2)
    theta = torch.cat((theta, theta), -1) if alike else torch.randn(batch, seq, rotary_dim)
    return theta.cos().to(dtype), theta.sin().to(dtype)


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, blocks: int = 3) -> None:
    def definition(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rotary(q, k, cos.double(), sin.double(), interleaved=interleaved)

    dtype = torch.promote_types(q.dtype, cos.dtype)
    grads = [torch.randn_like(x, dtype=dtype) for x in (q, k)]
    expected, expected_grads = in_double(definition, (q, k), grads)
    twin = kernels(blocks=blocks)
    outputs = twin.rotary(q, k, cos, sin, interleaved=interleaved, out_dtype=dtype)
    for name, y, reference_y in zip(("q", "k"), outputs, expected, strict=True):
        assert_close(y, reference_y, name)
    gradients = twin.rotary(*grads, cos, sin, interleaved=interleaved, transposed=True, out_dtype=q.dtype)
    for name, y, reference_y in zip(("grad_q", "grad_k"), gradients, expected_grads, strict=True):
        assert_close(y, reference_y, name)


# head_dim and rotary_dim: one pair, odd halves, parts that pass, more than 64 columns per half.
DIMS = [(2, 2), (6, 6), (20, 10), (64, 64), (80, 32), (200, 180)]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_values_and_gradients(dtype: torch.dtype, dims: tuple[int, int], interleaved: bool):
    torch.manual_seed(0)
    head_dim, rotary_dim = dims
    q, k = torch.randn(2, 5, 3, head_dim).to(dtype), torch.randn(2, 2, 3, head_dim).to(dtype)
    check(q, k, *angles(2, 3, rotary_dim, dtype, alike=interleaved), interleaved=interleaved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_wider_angles(dtype: torch.dtype, interleaved: bool):
    """float32 angles make float32 heads of 16-bit ones, and the gradient goes back."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 3, 4, 24).to(dtype), torch.randn(2, 1, 4, 24).to(dtype)
    check(q, k, *angles(1, 4, 20, torch.float32), interleaved=interleaved)


def test_transposed_views():
    """transformers rotates [batch, seq, heads, head_dim] in views of [batch, heads, seq, head_dim]."""
    torch.manual_seed(2)
    q, k = torch.randn(2, 4, 6, 32).bfloat16().transpose(1, 2), torch.randn(2, 4, 2, 32).bfloat16().transpose(1, 2)
    check(q, k, *angles(1, 4, 32, torch.bfloat16), interleaved=False)


def test_more_heads_than_a_tile_holds():
    torch.manual_seed(3)
    q, k = torch.randn(1, 300, 1, 64).bfloat16(), torch.randn(1, 80, 1, 64).bfloat16()
    check(q, k, *angles(1, 1, 64, torch.bfloat16), interleaved=False)
    check(q, k, *angles(1, 1, 64, torch.bfloat16), interleaved=True)


@pytest.mark.parametrize("dims", [(1026, 1026), (60000, 64)], ids=str)
def test_refuses_heads_that_do_not_fit(dims: tuple[int, int]):
    q, k = torch.zeros(1, 1, 1, dims[0]), torch.zeros(1, 1, 1, dims[0])
    with pytest.raises(RuntimeError, match=f"rotary_dim {dims[1]} and head_dim {dims[0]} are too large"):
        kernels().rotary(q, k, *angles(1, 1, dims[1], torch.float32))


def test_moves_each_byte_once():
    q, k = torch.randn(2, 8, 16, 64).bfloat16(), torch.randn(2, 2, 16, 64).bfloat16()
    twin = kernels(blocks=2)
    twin.rotary(q, k, *angles(1, 16, 64, torch.bfloat16))
    size = 2 * 10 * 16 * 64 * 2
    assert twin.report.counters["gm_written"] == size
    assert twin.report.counters["gm_read"] == size + 2 * (2 * 16 * 64 * 2)  # the angles once per position
