"""The AscendC SwiGLU on the twin against its definition."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels import reference
from tests.ascend.native import kernels
from tests.kernels.compare import KERNEL_DTYPES, assert_close, in_double

# Rows and length: one element, odd rows, whole blocks, parts of rows (8192 columns do not fit), more tiles than cores.
SHAPES = [(1, 1), (7, 3), (5, 17), (6, 64), (33, 130), (3, 9000), (300, 24)]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("concatenated", [False, True])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, int], concatenated: bool):
    torch.manual_seed(0)
    gate, up = 3 * torch.randn(2, *shape).to(dtype)
    inputs = (torch.cat((gate, up), -1),) if concatenated else (gate, up)
    grad_y = torch.randn(shape).to(dtype)
    (expected_y,), expected_grads = in_double(reference.swiglu, inputs, (grad_y,))
    twin = kernels(blocks=3)
    assert_close(twin.swiglu(*inputs), expected_y, "y")
    grads = twin.swiglu_backward(grad_y, *inputs)
    for name, actual, expected in zip(("grad_gate", "grad_up"), grads, expected_grads, strict=False):
        assert_close(actual, expected, name)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_extreme_arguments(dtype: torch.dtype):
    gate = torch.cat((torch.linspace(-120, 120, 481), torch.tensor([-1e4, -1e3, 0.0, 1e3, 1e4]))).to(dtype)[None]
    up = torch.ones_like(gate)
    (expected_y,), expected_grads = in_double(reference.swiglu, (gate, up), (up,))
    assert_close(kernels().swiglu(gate, up), expected_y, "y")
    for actual, expected in zip(kernels().swiglu_backward(up, gate, up), expected_grads, strict=True):
        assert_close(actual, expected, "gradient")


def test_results_do_not_depend_on_the_cores():
    torch.manual_seed(1)
    gate, up, grad_y = torch.randn(3, 40, 50).bfloat16()
    one, five = kernels(blocks=1), kernels(blocks=5)
    assert torch.equal(one.swiglu(gate, up), five.swiglu(gate, up))
    for a, b in zip(one.swiglu_backward(grad_y, gate, up), five.swiglu_backward(grad_y, gate, up), strict=True):
        assert torch.equal(a, b)


def test_moves_each_byte_once():
    gate, up = torch.randn(2, 64, 256).bfloat16()
    twin = kernels(blocks=2)
    twin.swiglu(gate, up)
    assert twin.report.counters["gm_read"] == 2 * 64 * 256 * 2
    assert twin.report.counters["gm_written"] == 64 * 256 * 2
