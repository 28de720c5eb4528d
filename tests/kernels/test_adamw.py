"""adamw_step_ against its definition and torch.optim.AdamW: values, clipping, copies, stochastic rounding, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import adamw_step_, reference
from tests.kernels.compare import KERNEL_DTYPES, assert_close, on_threads

OPTIONS: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7,), (3, 5), (4, 33), (1,), (0, 4), (130, 65), (5000,)]

State = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def state(shapes, *, param: torch.dtype = torch.float32, grad: torch.dtype = torch.float32, seed: int = 0) -> State:
    """Parameters, gradients and moments in the midst of training."""
    torch.manual_seed(seed)
    params = [torch.randn(s).to(param) for s in shapes]
    grads = [(0.1 * torch.randn(s)).to(grad) for s in shapes]
    return params, grads, [0.1 * torch.randn(s) for s in shapes], [0.01 * torch.rand(s) for s in shapes]


def copied(tensors: State, dtype: torch.dtype | None = None) -> State:
    params, grads, *moments = ([t.to(dtype or t.dtype, copy=True) for t in group] for group in tensors)
    return params, grads, *moments


def check(tensors: State, steps: list[int], **options: Any) -> None:
    """All results of one step against float64, relative to the sizes of the terms that cancel in them."""
    params, _, means, squares = tensors
    expected = copied(tensors, torch.float64)
    before = copied(tensors, torch.float64)
    adamw_step_(*tensors, steps, **OPTIONS | options)
    reference.adamw_step_(*expected, steps, **OPTIONS | options)
    for i in range(len(params)):
        if params[i].numel() == 0:
            continue
        scale = max(before[2][i].abs().max().item(), (before[1][i] * options.get("grad_scale", 1.0)).abs().max().item())
        assert_close(means[i], expected[2][i], "exp_avg", scale=scale)
        assert_close(squares[i], expected[3][i], "exp_avg_sq")
        # An update is lr times a ratio of moments, whose rounding errors it takes over.
        update = (expected[0][i] - before[0][i]).abs().max().item()
        assert_close(params[i], expected[0][i], "param", scale=expected[0][i].abs().max().item() + update)


@pytest.mark.parametrize("grad", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16], ids=str)
def test_values(param: torch.dtype, grad: torch.dtype) -> None:
    tensors = state(SHAPES, param=param, grad=grad)
    check(tensors, [1, 2, 3, 10, 5, 1000, 100_000])
    check(tensors, [2] * len(SHAPES), grad_scale=0.37, weight_decay=0.0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 70), min_size=0, max_size=3), min_size=0, max_size=6),
    st.sampled_from(KERNEL_DTYPES),
    st.sampled_from([1.0, 0.01]),
    st.integers(1, 5000),
)
def test_any_list(shapes, grad: torch.dtype, grad_scale: float, step: int) -> None:
    check(state(shapes, grad=grad, seed=step), [step] * len(shapes), grad_scale=grad_scale)


def test_many_steps_follow_torch_with_clipping() -> None:
    """Twenty steps of torch's fused AdamW on scaled gradients, from empty moments: apart by rounding only."""
    params, *_ = state(SHAPES)
    ours = [p.clone() for p in params]
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    leaves = [p.requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(leaves, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(1, 21):
        torch.manual_seed(step)
        grads = [torch.randn(s) for s in SHAPES]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad * 0.25
        optimizer.step()
        adamw_step_(ours, grads, means, squares, [step] * len(SHAPES), grad_scale=0.25, **OPTIONS)
    for leaf, param, mean, square in zip(leaves, ours, means, squares, strict=True):
        torch.testing.assert_close(param, leaf.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mean, optimizer.state[leaf]["exp_avg"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(square, optimizer.state[leaf]["exp_avg_sq"], rtol=1e-6, atol=1e-9)


def test_gradients_of_any_strides() -> None:
    params, grads, *moments = state([(40, 30), (6, 5, 4), (8, 9)])
    dense = copied((params, grads, *moments))
    strided = [grads[0].t().contiguous().t(), grads[1].permute(2, 0, 1).contiguous().permute(1, 2, 0)]
    strided.append(torch.ones(1).expand(8, 9))
    dense[1][2].fill_(1.0)
    adamw_step_(params, strided, *moments, [3, 3, 3], **OPTIONS)
    adamw_step_(*dense, [3, 3, 3], **OPTIONS)
    assert all(map(torch.equal, params, dense[0]))


def test_parameters_in_another_memory_order_are_updated_in_place() -> None:
    tensors = state([(6, 5)])
    expected = copied(tensors)
    transposed = [t.t().contiguous().t() for t in (tensors[0][0], tensors[2][0], tensors[3][0])]
    adamw_step_([transposed[0]], tensors[1], [transposed[1]], [transposed[2]], [1], **OPTIONS)
    adamw_step_(*expected, [1], **OPTIONS)
    torch.testing.assert_close(transposed[0], expected[0][0])


def test_copies_are_the_rounded_parameters() -> None:
    tensors = state(SHAPES)
    plain = copied(tensors)
    copies = [torch.full(s, torch.nan, dtype=torch.bfloat16) for s in SHAPES]
    adamw_step_(*tensors, [1] * len(SHAPES), copies=copies, **OPTIONS)
    adamw_step_(*plain, [1] * len(SHAPES), **OPTIONS)
    assert all(map(torch.equal, tensors[0], plain[0]))
    assert all(torch.equal(copy, param.bfloat16()) for copy, param in zip(copies, tensors[0], strict=True))


def test_larger_than_the_cache() -> None:
    """Copies of large parameters go past the cache: another instruction, the same numbers as in small pieces."""
    shapes = [(63,), (3000, 1000), (1001,)]
    tensors = state(shapes, grad=torch.bfloat16)
    pieces = copied(tensors)
    copies, piece_copies = ([torch.empty(s, dtype=torch.bfloat16) for s in shapes] for _ in range(2))
    adamw_step_(*tensors, [1, 1, 1], copies=copies, **OPTIONS)
    for part in zip(*pieces, piece_copies, strict=True):
        for p, g, m, v, c in zip(*(t.split(500) for t in part), strict=True):
            adamw_step_([p], [g], [m], [v], [1], copies=[c], **OPTIONS)
    for whole, piece in zip((*tensors, copies), (*pieces, piece_copies), strict=True):
        assert all(map(torch.equal, whole, piece))


@pytest.mark.parametrize("seed", [None, 7])
def test_thread_count_does_not_show(seed: int | None) -> None:
    def run() -> State:
        tensors = state([(9000,), (3,), (130, 333)], param=torch.bfloat16)
        adamw_step_(*tensors, [1, 2, 3], rounding_seed=seed, **OPTIONS)
        return tensors

    first, *others = on_threads((1, 2, 3), run)
    for other in others:
        assert all(torch.equal(a, b) for group in zip(first, other, strict=True) for a, b in zip(*group, strict=True))


class TestStochasticRounding:
    def test_is_the_definition(self) -> None:
        """The same random numbers: results differ only where the float32 values before the rounding do."""
        tensors = state([(100, 100), (4097,)], param=torch.bfloat16)
        expected = copied(tensors)
        adamw_step_(*tensors, [1, 1], rounding_seed=-5, **OPTIONS)
        reference.adamw_step_(*expected, [1, 1], rounding_seed=-5, **OPTIONS)
        different = sum((a != b).sum().item() for a, b in zip(tensors[0], expected[0], strict=True))
        assert different < 0.001 * 14097  # of 2^16 fractions, an error of a few float32 units moves a few

    def test_is_right_on_average_where_rounding_to_nearest_stands_still(self) -> None:
        """A learning rate of a tenth of bfloat16's resolution: 40 updates must move a weight of 1 by 4 units."""
        count, unit = 20_000, 2.0**-8  # bfloat16 below 1
        moved = {}
        for stochastic in (False, True):
            params = [torch.ones(count, dtype=torch.bfloat16)]
            moments = [torch.zeros(count)], [torch.zeros(count)]
            for step in range(1, 41):
                adamw_step_(
                    params, [torch.ones(count)], *moments, [step], lr=0.1 * unit, weight_decay=0.0,
                    rounding_seed=step if stochastic else None,
                )  # fmt: skip
            moved[stochastic] = (1 - params[0].float().mean().item()) / unit
        assert moved[False] == 0
        # A unit is lost or kept with a deviation below sqrt(40) / 2 each; the mean of 20 000 deviates by 0.022.
        assert abs(moved[True] - 4) < 5 * 0.5 * 40**0.5 / count**0.5

    def test_seeds_parameters_and_elements_are_independent(self) -> None:
        """Which of many equal elements are rounded up: about half of any two agree, as of coins."""
        count = 40_000

        def rounded_up(seed: int) -> list[Tensor]:
            params = [torch.ones(count, dtype=torch.bfloat16) for _ in range(2)]
            zeros = [torch.zeros(count) for _ in range(2)]
            adamw_step_(
                params, [torch.ones(count)] * 2, zeros, [z.clone() for z in zeros], [1, 1], lr=2.0**-9,
                weight_decay=0.0, rounding_seed=seed,
            )  # fmt: skip
            return [p == 1 for p in params]

        a, b, c = *rounded_up(1), rounded_up(2)[0]
        pairs = [(a, b), (a, c), (b, c), (a[1:], a[:-1]), (a[16:], a[:-16]), (a[count // 2 :], a[: count // 2])]
        for x, y in pairs:
            assert abs((x == y).float().mean().item() - 0.5) < 5 * 0.5 / (count / 2) ** 0.5
        assert torch.equal(a, rounded_up(1)[0])

    def test_nan_is_not_rounded_to_a_number(self) -> None:
        """Its mantissa may be all ones, to which nothing can be added."""
        tensors = state([(64,)], param=torch.bfloat16)
        tensors[1][0][:2] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
        adamw_step_(*tensors, [1], rounding_seed=0, **OPTIONS)
        assert tensors[0][0][:2].isnan().all()
        assert tensors[0][0][2:].isfinite().all()


def test_a_graph_that_saved_a_parameter_notices_the_update() -> None:
    param = torch.ones(3, requires_grad=True)
    y = param.square().sum()
    adamw_step_([param], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], [1], **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_compile() -> None:
    def call(params, grads, means, squares) -> None:
        adamw_step_(params, grads, means, squares, [1, 2], **OPTIONS)

    tensors = state([(5, 4), (9,)])
    expected = copied(tensors)
    call(*expected)
    torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(torch.equal(a, b) for group in zip(tensors, expected, strict=True) for a, b in zip(*group, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t[1].pop(), ["grads", "2 params", "has 1"]),
        (lambda t: t[4].append(1), ["steps", "2 params", "has 3"]),
        (lambda t: t[1].__setitem__(1, torch.ones(2, 1)), ["grads[1]", "params[1]", "[2, 3]", "[2, 1]"]),
        (lambda t: t[2].__setitem__(0, t[2][0][:2]), ["exp_avgs[0]", "params[0]", "[4]", "[2]"]),
        (lambda t: t[4].__setitem__(1, 0), ["steps[1]", "is 0"]),
    ],
    ids=["gradient-missing", "step-too-many", "gradient-shape", "moment-shape", "step-zero"],
)
def test_errors_name_the_arguments(dtype: torch.dtype, change, named: list[str]) -> None:
    groups = [[torch.ones(4, dtype=dtype), torch.ones(2, 3, dtype=dtype)] for _ in range(4)]
    arguments = [*groups, [1, 1]]
    change(arguments)
    with pytest.raises(RuntimeError) as error:
        adamw_step_(*arguments, **OPTIONS)
    assert all(part in str(error.value) for part in ("adamw_step_", *named)), error.value


def test_moments_must_be_float32() -> None:
    tensors = state([(4,)])
    with pytest.raises(RuntimeError, match=r"exp_avgs\[0\] must be Float, but is BFloat16"):
        adamw_step_(tensors[0], tensors[1], [tensors[2][0].bfloat16()], tensors[3], [1], **OPTIONS)
