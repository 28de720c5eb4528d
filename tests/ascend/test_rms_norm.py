"""The AscendC RMSNorm on the twin against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_kernels import reference
from tests.ascend.native import kernels
from tests.kernels.compare import KERNEL_DTYPES, assert_close, in_double
from tests.kernels.test_rms_norm import sizes_of_terms


def check(
    x: Tensor, weight: Tensor | None, residual: Tensor | None = None, *, cast_order: str = "hf", blocks: int = 3
) -> None:
    """Values and all gradients; ``weight`` is float32, of which x's dtype is the one that the definition sees."""
    eps, round_before_weight = 1e-5, cast_order == "hf"
    twin = kernels(blocks=blocks)
    options = {"round_before_weight": round_before_weight}
    y_dtype = reference.rms_norm(x[:1], weight, cast_order=cast_order).dtype  # type: ignore[arg-type]
    y, total, rstd = twin.rms_norm(x, weight, eps=eps, residual=residual, y_dtype=y_dtype, **options)
    if residual is not None:
        assert total is not None
        torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    start = x if total is None else total
    assert_close(rstd, torch.rsqrt(start.double().square().mean(-1) + eps), "rstd")

    def definition(x: Tensor, *weight: Tensor) -> Tensor:
        return reference.rms_norm(x, *weight, eps=eps, cast_order=cast_order)  # type: ignore[arg-type]

    grad_y = torch.randn_like(y)
    grad_sum = None if residual is None else torch.randn_like(x)
    inputs = (start,) if weight is None else (start, weight)
    (expected_y,), expected_grads = in_double(definition, inputs, (grad_y,))
    assert_close(y.to(x.dtype), expected_y, "y", roundings=2)  # a wider y has an x̂ that was rounded to x's dtype

    weight_gradient = weight is not None
    grad_x, grad_weight = twin.rms_norm_backward(
        grad_y, start, weight, rstd, grad_sum=grad_sum, weight_gradient=weight_gradient, **options
    )
    grads = (grad_y,) if grad_sum is None else (grad_y, grad_sum)
    scale_x, scale_weight = sizes_of_terms(start, weight, None, grads, eps=eps)
    expected_x = expected_grads[0] + (0 if grad_sum is None else grad_sum.double())
    assert_close(grad_x, expected_x, "grad_x", scale=scale_x)
    if grad_weight is not None:
        # The sum is float32, but its terms hold an x̂ that was rounded to x's dtype.
        rounded = round_before_weight and x.dtype != torch.float32
        slack = torch.finfo(x.dtype).eps / 2 * scale_weight if rounded else 0.0
        error = (grad_weight.double() - expected_grads[1]).abs().max().item()
        assert error <= 16 * torch.finfo(torch.float32).eps * scale_weight + slack


# Rows and hidden: one element, odd rows, whole blocks, several tiles per core, rows that have to be read in parts.
SHAPES = [(1, 1), (7, 3), (5, 17), (3, 64), (70, 33), (300, 24), (2, 1000), (2, 8200), (1, 24576)]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, int]):
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[1]).to(dtype).float()
    check(x, weight if dtype == torch.float32 else None)
    check(x, weight, residual, cast_order="float32")
    check(x, None, residual)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [40, 8200])
def test_rounds_before_the_weight(dtype: torch.dtype, hidden: int):
    """The order of transformers with a float32 weight: y is float32."""
    torch.manual_seed(1)
    x, weight = torch.randn(9, hidden).to(dtype), torch.randn(hidden)
    check(x, weight, x.flip(0))


@pytest.mark.parametrize("cast_order", ["hf", "float32"])
def test_same_bits_as_the_definition(cast_order: str):
    """y in x's dtype with a weight of it, as models have it; the two orders differ in a quarter of the elements."""
    torch.manual_seed(2)
    x, weight = torch.randn(32, 256).bfloat16(), torch.randn(256).bfloat16()
    y, _, _ = kernels().rms_norm(x, weight.float(), eps=1e-6, round_before_weight=cast_order == "hf")
    expected = reference.rms_norm(x, weight, cast_order=cast_order)  # type: ignore[arg-type]
    assert (y != expected).float().mean() < 0.005  # sums in another order move a rounding now and then


def test_results_do_not_depend_on_the_cores():
    """Except the weight's gradient, which depends on their number, but not on their order."""
    torch.manual_seed(3)
    x, grad_y, weight = torch.randn(50, 40).bfloat16(), torch.randn(50, 40).bfloat16(), torch.randn(40)
    results = []
    for blocks in (1, 5, 5):
        twin = kernels(blocks=blocks)
        y, _, rstd = twin.rms_norm(x, weight, eps=1e-6, round_before_weight=True)
        results.append((y, rstd, *twin.rms_norm_backward(grad_y, x, weight, rstd, round_before_weight=True)))
    for one, five, again in zip(*results, strict=True):
        assert torch.equal(five, again)
        assert torch.equal(one, five) or one is results[0][3]


def test_refuses_rows_whose_weight_gradient_does_not_fit():
    x = torch.zeros(1, 24577)
    with pytest.raises(RuntimeError, match="hidden is 24577, but at most 24576"):
        kernels().rms_norm_backward(x, x, None, torch.ones(1), round_before_weight=True)


def test_moves_each_byte_once():
    x, residual, weight = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16(), torch.randn(256)
    twin = kernels(blocks=2)
    twin.rms_norm(x, weight, eps=1e-6, round_before_weight=True, residual=residual)
    size = 64 * 256 * 2
    assert twin.report.counters["gm_read"] == 2 * size + 2 * 256 * 4  # the weight once per core
    assert twin.report.counters["gm_written"] == 2 * size + 64 * 4
