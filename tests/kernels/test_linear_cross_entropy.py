"""linear_cross_entropy against its definition: values, gradients, chunks, precision, memory, edge cases, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mindspeed_kernels import linear_cross_entropy, reference
from mindspeed_kernels.ops import linear_cross_entropy as op
from tests.kernels.compare import KERNEL_DTYPES, assert_close, check_second_derivative, gradients, in_double, on_threads

IGNORED = -100
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "all": {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.02, "ignore_index": 3},
}


def problem(tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype, *, seed: int = 0) -> list[Tensor]:
    """hidden, weight, bias and targets, some of which are ignored (the first: gradients must not depend on it)."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size).to(dtype)
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,))
    targets[torch.rand(tokens) < 0.3] = IGNORED
    targets[:1] = IGNORED
    return [hidden, weight, torch.randn(vocabulary).to(dtype), targets]


def check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> None:
    """Values and all gradients of the sum and of the losses of each token, with a gradient of their own each."""
    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    if options.get("ignore_index", IGNORED) != IGNORED:
        targets = torch.where(targets == IGNORED, options["ignore_index"], targets)
    for reduction, cotangent in (("none", torch.randn(targets.shape)), ("sum", torch.tensor(0.3))):

        def call(function, *leaves: Tensor, reduction: str = reduction, **more: Any) -> Tensor:
            given = {k: v for k, v in options.items() if k != "chunk"}
            return function(*leaves[:2], targets, *leaves[2:], reduction=reduction, **given, **more)

        chunk = options.get("chunk")
        (loss,), grads = gradients(lambda *x: call(linear_cross_entropy, *x, chunk=chunk), leaves, (cotangent,))  # noqa: B023
        (expected,), expected_grads = in_double(
            lambda *x: call(reference.linear_cross_entropy, *x), leaves, (cotangent,)
        )
        assert loss.dtype == torch.float32
        assert_close_given_logits(loss, expected, hidden.dtype, "loss")
        for name, grad, wanted in zip(("hidden", "weight", "bias"), grads, expected_grads, strict=False):
            assert grad.dtype == hidden.dtype
            assert_close_given_logits(grad, wanted, hidden.dtype, f"{reduction}: gradient of {name}")


def assert_close_given_logits(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    """Logits of some units are rounded to ``dtype``: relative errors of that size in what follows from them."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all(), name
    allowed = 8 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    scale = expected.abs().max().clamp_min(1e-30) if expected.numel() else 1.0
    error = ((actual.double() - expected).abs() / scale).max().item() if expected.numel() else 0.0
    assert error <= allowed, f"{name} ({dtype}): {error:.2e} of the largest, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [None, 5])
def test_values_and_gradients(dtype: torch.dtype, variant: str, chunk: int | None) -> None:
    hidden, weight, bias, targets = problem(23, 24, 131, dtype)  # no multiple of a chunk or a vector
    check(hidden, weight, None, targets, chunk=chunk, **VARIANTS[variant])
    check(hidden, weight, bias, targets, chunk=chunk, **VARIANTS[variant])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(4, 200),
    st.sampled_from(KERNEL_DTYPES),
    st.integers(1, 50),
    st.sampled_from(sorted(VARIANTS)),
)
def test_any_call(tokens, hidden_size, vocabulary, dtype, chunk, variant) -> None:
    hidden, weight, _, targets = problem(tokens, hidden_size, vocabulary, dtype, seed=tokens)
    check(hidden, weight, None, targets, chunk=chunk, **VARIANTS[variant])


@pytest.mark.parametrize("chunk", [None, 4])
def test_equals_torch(chunk: int | None) -> None:
    """Against F.cross_entropy itself, in float64, with gradients checked by differences."""
    hidden, weight, bias, targets = problem(11, 6, 17, torch.float64)
    logits = F.linear(hidden, weight, bias)
    for smoothing in (0.0, 0.1):
        options = {"ignore_index": IGNORED, "label_smoothing": smoothing}
        for reduction in ("sum", "none"):
            loss = linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, chunk=chunk, **options)
            torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction=reduction, **options))
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    for reduction in ("sum", "none"):

        def loss_of(h: Tensor, w: Tensor, b: Tensor, reduction: str = reduction) -> Tensor:
            return linear_cross_entropy(
                h, w, targets, b, reduction=reduction, chunk=chunk, softcap=1.5, label_smoothing=0.1, z_loss=0.1
            )

        assert torch.autograd.gradcheck(loss_of, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_do_not_grow_with_the_number_of_chunks(dtype: torch.dtype) -> None:
    """256 tokens in 1 to 256 chunks. All have the same target, so that its row's gradient adds up over all of them."""
    hidden, weight, _, _ = problem(256, 16, 40, dtype)
    hidden = hidden.abs()
    targets = torch.full((256,), 7)
    _, (_, expected) = in_double(
        lambda h, w: reference.linear_cross_entropy(h, w, targets), (hidden, weight), (torch.tensor(1.0),)
    )
    errors = {}
    for chunk in (256, 64, 16, 4, 1):
        _, (_, grad) = gradients(
            lambda h, w, chunk=chunk: linear_cross_entropy(h, w, targets, chunk=chunk),
            (hidden, weight),
            (torch.tensor(1.0),),
        )
        errors[chunk] = ((grad.double() - expected).abs() / expected.abs().amax(1, keepdim=True)).max().item()
    assert max(errors.values()) < 2 * errors[256], errors


def test_sums_of_24_bits() -> None:
    """A thousand additions, each smaller than half a unit of bfloat16: a bfloat16 sum would stand still."""
    high, low = torch.ones(50, dtype=torch.bfloat16), torch.zeros(50, dtype=torch.uint8)
    addend = torch.full((50,), 2.0**-10, dtype=torch.bfloat16)
    for i in range(1024):
        torch.ops.mindspeed.add_to_bfloat16_sum_(high, low, -addend if i % 4 == 3 else addend, i == 1023)
    assert torch.equal(high, torch.full((50,), 1.5, dtype=torch.bfloat16))


def test_not_a_number_stays_in_sums() -> None:
    high, low = torch.tensor([torch.nan, 1.0, torch.inf]).bfloat16(), torch.zeros(3, dtype=torch.uint8)
    for last in (False, True):
        torch.ops.mindspeed.add_to_bfloat16_sum_(high, low, torch.tensor([1.0, 1.0, 1.0]).bfloat16(), last)
    assert high[0].isnan()
    assert torch.equal(high[1:], torch.tensor([3.0, torch.inf]).bfloat16())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_all_ignored(reduction: str) -> None:
    hidden, weight, bias, targets = problem(6, 8, 10, torch.float32)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy(
        hidden, weight, torch.full_like(targets, IGNORED), bias, reduction=reduction, z_loss=1.0
    )
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros_like(loss))
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tokens(dtype: torch.dtype) -> None:
    for reduction in ("sum", "none"):
        hidden, weight = torch.randn(0, 8).to(dtype).requires_grad_(), torch.randn(5, 8).to(dtype).requires_grad_()
        targets = torch.empty(0, dtype=torch.int64)
        linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum().backward()
        assert hidden.grad.shape == (0, 8)
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_leading_dimensions_and_strides() -> None:
    """hidden [batch, seq, hidden_size] as a slice of every row but the last, and a weight stored transposed."""
    hidden, weight, _, _ = problem(30, 8, 20, torch.float32)
    batch = hidden.view(5, 6, 8)[:, :-1]
    targets = torch.randint(20, (5, 5))
    losses = linear_cross_entropy(batch, weight.t().contiguous().t(), targets, reduction="none")
    expected = reference.linear_cross_entropy(batch.double(), weight.double(), targets, reduction="none")
    assert losses.shape == (5, 5)
    assert_close(losses, expected, "losses")


def test_an_expanded_gradient_and_a_second_backward() -> None:
    hidden, weight, _, targets = problem(9, 8, 20, torch.float32)
    hidden.requires_grad_()
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none", chunk=4)
    total = linear_cross_entropy(hidden, weight, targets, chunk=4)
    (expected,) = torch.autograd.grad(total, hidden, retain_graph=True)
    (again,) = torch.autograd.grad(total * 2, hidden)
    (of_losses,) = torch.autograd.grad(losses.sum(), hidden)
    torch.testing.assert_close(of_losses, expected)
    assert torch.equal(again, 2 * expected)


def test_only_wanted_gradients_are_computed() -> None:
    hidden, weight, _, targets = problem(9, 8, 20, torch.float32)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
        outputs = torch.ops.mindspeed.linear_cross_entropy_sum(
            hidden,
            weight,
            None,
            targets,
            IGNORED,
            None,
            0.0,
            0.0,
            4,
            [t.requires_grad for t in (hidden, weight)] + [False],
        )
        assert [t.numel() for t in outputs[1:]] == [72 * hidden.requires_grad, 160 * weight.requires_grad, 0]
        linear_cross_entropy(hidden, weight, targets).backward()
        assert leaf.grad is not None
        leaf.requires_grad_(False)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden.requires_grad_(), weight, targets).requires_grad


def test_extreme_logits() -> None:
    """Logits of ±1e4 neither overflow nor vanish; a masked vocabulary entry of -inf takes no part."""
    weight = torch.tensor([[1e4], [-1e4], [9999.0], [0.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 0.0, -torch.inf])
    hidden, targets = torch.tensor([[1.0], [-1.0]], requires_grad=True), torch.tensor([0, 0])
    losses = linear_cross_entropy(hidden, weight, targets, bias, reduction="none")
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert torch.equal(weight.grad[3], torch.zeros(1))


def test_padded_lanes_do_not_count() -> None:
    """A vocabulary of 5 in vectors of 16: neither zeros nor capped zeros beyond the end may enter the sums."""
    hidden, weight, _, targets = problem(3, 4, 5, torch.float32)
    targets[:] = torch.tensor([0, 4, 2])
    check(hidden, -weight.abs() * 30, None, targets, softcap=20.0)


def test_thread_count_does_not_show() -> None:
    hidden, weight, bias, targets = problem(70, 32, 1001, torch.bfloat16)

    def run() -> Any:
        return gradients(
            lambda h, w, b: linear_cross_entropy(h, w, targets, b, chunk=32),
            (hidden, weight, bias),
            (torch.tensor(1.0),),
        )

    first, *others = on_threads((1, 2, 3), run)
    for losses, grads in others:
        assert torch.equal(losses[0], first[0][0])
        assert all(map(torch.equal, grads, first[1]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_second_derivative(reduction: str) -> None:
    hidden, weight, _, targets = problem(5, 4, 7, torch.float32)
    loss, definition = (
        lambda hidden, weight, f=f: f(hidden, weight, targets, reduction=reduction)
        for f in (linear_cross_entropy, reference.linear_cross_entropy)
    )
    check_second_derivative(loss, definition, (hidden, weight))


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_devices_take_the_same_steps(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels, chunk by chunk all the same."""
    monkeypatch.setattr(op, "has_kernel", lambda *tensors: False)
    for dtype in KERNEL_DTYPES:
        check(*problem(23, 24, 131, dtype), chunk=5, **VARIANTS[variant])


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most that tensors made by ``function()`` hold at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(dtype: torch.dtype, reduction: str) -> None:
    """Beyond the gradients no more than a quarter of what the plain computation takes: chunks, and one more of them."""
    hidden, weight, _, targets = problem(1024, 512, 16000, dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    returned = sum(t.numel() * t.element_size() for t in leaves)

    def plain() -> tuple[Tensor, ...]:
        losses = F.cross_entropy(hidden @ weight.t(), targets, reduction=reduction)
        return torch.autograd.grad(losses.sum(), leaves)

    def fused() -> tuple[Tensor, ...]:
        losses = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk=64)
        return torch.autograd.grad(losses.sum(), leaves)

    assert peak_bytes(fused) - returned <= (peak_bytes(plain) - returned) / 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda a: a.update(weight=torch.ones(5, 7)), ["hidden", "weight", "[3, 8]", "[5, 7]"]),
        (lambda a: a.update(targets=torch.zeros(2, dtype=torch.int64)), ["targets", "int64 [3]", "[2]"]),
        (lambda a: a.update(targets=torch.zeros(3)), ["targets", "int64", "float32"]),
        (lambda a: a.update(bias=torch.ones(4)), ["bias", "[5]", "[4]"]),
        (lambda a: a.update(weight=torch.ones(5, 8).bfloat16()), ["one dtype", "float32", "bfloat16"]),
        (lambda a: a.update(targets=torch.tensor([0, 5, 1])), ["targets[1] is 5", "[0, 5)", "-100"]),
        (lambda a: a.update(targets=torch.tensor([0, 1, -1])), ["targets[2] is -1"]),
    ],
    ids=["weight", "targets", "target-dtype", "bias", "dtypes", "target-too-large", "target-negative"],
)
def test_errors_name_the_arguments(change, named: list[str]) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(3, 8), "weight": torch.ones(5, 8), "targets": torch.zeros(3, dtype=torch.int64)
    }  # fmt: skip
    change(arguments)
    with pytest.raises(RuntimeError) as error:
        linear_cross_entropy(**arguments)
    assert all(part in str(error.value) for part in ("cross_entropy", *named)), error.value


def test_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="reduction must be 'sum' or 'none', not 'mean'"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), reduction="mean")
