"""fused_experts against its definition: values, gradients, layouts of weights, activations, skipped experts, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import fused_experts, reference
from tests.kernels.compare import (
    KERNEL_DTYPES,
    LAYOUTS,
    assert_close,
    check_second_derivative,
    gradients,
    in_double,
    on_threads,
)

GPT_OSS = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


@dataclass
class Problem:
    """Random experts whose activations are of size one, and their call."""

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.float32
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    elsewhere: int = 0
    """How many more experts there are, on other ranks."""

    def __post_init__(self) -> None:
        if self.dtype != torch.float32 and "limit" in self.options:
            # A rounding error that moves an element across the limit is a jump in its gradient.
            self.options = self.options | {"limit": 100.0}
        up, out = 2 * self.intermediate, self.hidden
        self.index = torch.randint(0, self.num_experts + self.elsewhere, (self.tokens, self.top_k))
        x, grad = torch.randn(2, self.tokens, self.hidden)
        gate_up = torch.randn(self.num_experts, up, self.hidden) * 1.5 * self.hidden**-0.5
        down = torch.randn(self.num_experts, out, self.intermediate) * max(1, self.intermediate) ** -0.5
        if self.options.get("transposed"):
            gate_up, down = gate_up.mT, down.mT
        self.grad = grad.to(self.dtype)
        self.inputs = [x.to(self.dtype), torch.rand(self.tokens, self.top_k), gate_up.to(self.dtype).contiguous()]
        self.inputs.append(down.to(self.dtype).contiguous())
        self.names = ["grad_x", "grad_top_k_weights", "grad_gate_up", "grad_down"]
        if self.bias:
            self.inputs += [torch.randn(self.num_experts, up).to(self.dtype), torch.randn(self.num_experts, out)]
            self.inputs[-1] = self.inputs[-1].to(self.dtype)
            self.names += ["grad_gate_up_bias", "grad_down_bias"]

    def fused(self, x, weights, gate_up, down, gate_up_bias=None, down_bias=None) -> Tensor:
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return fused_experts(x, self.index, weights, gate_up, down, **biases, **self.options)

    def definition(self, x, weights, gate_up, down, gate_up_bias=None, down_bias=None, index=None) -> Tensor:
        index = self.index if index is None else index
        return reference.fused_experts(x, index, weights, gate_up, gate_up_bias, down, down_bias, **self.options)

    def check(self) -> None:
        """Values and gradients. Terms cancel in all sums; what size they have, the largest of many sums shows."""
        (y,), grads = gradients(self.fused, self.inputs, (self.grad,))
        (expected,), expected_grads = in_double(self.definition, self.inputs, (self.grad,))
        for name, actual, wanted in zip(["y", *self.names], (y, *grads), (expected, *expected_grads), strict=True):
            assert actual.dtype == (torch.float32 if name == "grad_top_k_weights" else self.dtype)
            if self.dtype == torch.float32:
                few = name == "grad_top_k_weights"  # there may be a single one
                assert_close(actual, wanted, name, scale=self.size_of_weight_gradients() if few else None)
            else:
                self.check_rounded(actual, wanted, name)

    def size_of_weight_gradients(self) -> float:
        """The largest sum of absolute values of a weight's gradient's terms: grad · (output of an expert)."""
        x, weights, *parameters = (t.double() for t in self.inputs)
        sizes = [0.0]
        for choice in self.index.split(1, dim=1):
            y = self.definition(x, torch.ones_like(weights[:, :1]), *parameters, index=choice)
            sizes += (self.grad.double() * y).abs().sum(-1).tolist()
        return max(sizes)

    def check_rounded(self, actual: Tensor, wanted: Tensor, name: str) -> None:
        """Intermediate results are rounded to half precision too: independent errors, each of half a unit of a term,
        add up to a small part of the result's typical size."""
        assert actual.isfinite().all(), name
        if not wanted.any():
            assert not actual.any(), name
            return
        unit = torch.finfo(self.dtype).eps / 2
        error = actual.double() - wanted
        assert error.norm() <= 4 * unit * wanted.norm(), f"{name}: {error.norm() / wanted.norm():.2e}"
        assert error.abs().max() <= 8 * unit * wanted.abs().max(), f"{name}: {error.abs().max():.2e}"


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, GPT_OSS, {"transposed": True}, {"interleaved": True, "limit": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "num_experts", "top_k"),
    [(3, 8, 4, 2, 1), (40, 33, 17, 5, 2), (65, 64, 96, 8, 4), (30, 20, 600, 2, 2), (1100, 16, 24, 2, 1)],
    ids=str,
)
def test_values_and_gradients(dtype, options, tokens, hidden, intermediate, num_experts, top_k) -> None:
    torch.manual_seed(0)
    for bias in (False, True):
        Problem(tokens, hidden, intermediate, num_experts, top_k, dtype, bias, options).check()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(8, 40),
    st.integers(8, 40),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([{}, GPT_OSS]),
    st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 5),
)
def test_any_call(tokens, hidden, intermediate, num_experts, top_k, elsewhere, bias, options, layouts) -> None:
    torch.manual_seed(hidden)
    problem = Problem(tokens, hidden, intermediate, num_experts, top_k, bias=bias, options=options, elsewhere=elsewhere)
    for i, layout in enumerate(layouts[:4]):
        problem.inputs[i] = LAYOUTS[layout](problem.inputs[i])
    problem.grad = LAYOUTS[layouts[4]](problem.grad)
    problem.check()


def test_experts_without_tokens_have_zero_gradients() -> None:
    torch.manual_seed(1)
    problem = Problem(6, 8, 4, 3, 2, bias=True, options=GPT_OSS)
    problem.index = torch.full((6, 2), 1)
    _, grads = gradients(problem.fused, problem.inputs, (problem.grad,))
    for name, grad in zip(problem.names[2:], grads[2:], strict=True):
        assert not grad[0].any(), name
        assert not grad[2].any(), name
        assert grad[1].any(), name


def test_every_expert_elsewhere() -> None:
    problem = Problem(5, 8, 4, 2, 2, bias=True)
    problem.index = torch.full((5, 2), 2)
    (y,), grads = gradients(problem.fused, problem.inputs, (problem.grad,))
    assert not y.any()
    assert not any(grad.any() for grad in grads)


def test_expanded_gradient() -> None:
    torch.manual_seed(2)
    problem = Problem(9, 16, 8, 3, 2)
    problem.grad = torch.ones(()).expand(9, 16)
    problem.check()


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "num_experts"), [(0, 8, 4, 2), (3, 8, 0, 2), (3, 8, 4, 0)]
)
def test_zero_sizes(tokens: int, hidden: int, intermediate: int, num_experts: int) -> None:
    problem = Problem(tokens, hidden, intermediate, num_experts, 2, bias=True, elsewhere=1)
    (y,), grads = gradients(problem.fused, problem.inputs, (problem.grad,))
    assert y.shape == (tokens, hidden)
    assert all(g.shape == t.shape for g, t in zip(grads, problem.inputs, strict=True))
    if intermediate == 0:
        expected, expected_grads = in_double(problem.definition, problem.inputs, (problem.grad,))
        assert_close(y, expected[0], "y")
        assert_close(grads[1], expected_grads[1], "grad_top_k_weights")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_thread_count_does_not_show(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    problem = Problem(700, 40, 70, 3, 2, dtype, bias=True, elsewhere=1)
    results = on_threads((1, 2, 3), lambda: gradients(problem.fused, problem.inputs, (problem.grad,)))
    for outputs, grads in results[1:]:
        assert all(map(torch.equal, outputs + grads, results[0][0] + results[0][1]))


def test_weights_of_the_inputs_dtype() -> None:
    torch.manual_seed(4)
    problem = Problem(20, 16, 8, 3, 2, torch.bfloat16)
    x, weights, *parameters = problem.inputs
    half = weights.bfloat16()
    _, grads = gradients(problem.fused, (x, half, *parameters), (problem.grad,))
    _, wide_grads = gradients(problem.fused, (x, half.float(), *parameters), (problem.grad,))
    assert torch.equal(grads[1], wide_grads[1].bfloat16())


def test_frozen_experts() -> None:
    torch.manual_seed(6)
    problem = Problem(9, 16, 8, 3, 2, bias=True)
    _, expected = gradients(problem.fused, problem.inputs, (problem.grad,))
    x, weights, *parameters = problem.inputs
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    grads = torch.autograd.grad(problem.fused(*leaves, *parameters), leaves, problem.grad)
    assert all(map(torch.equal, grads, expected[:2]))


def test_keeps_nothing_but_the_activations_input() -> None:
    problem = Problem(9, 16, 8, 3, 2, bias=True)
    leaves = [t.requires_grad_() for t in problem.inputs]
    known = {t.data_ptr() for t in (*leaves, problem.index)}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        problem.fused(*leaves)
    assert kept == [(9 * 2, 2 * 8)]


def test_clamped_elements_get_no_gradient() -> None:
    problem = Problem(1, 1, 1, 1, 1, options={"limit": 1.0})
    problem.index.zero_()
    for gate, up, gate_is_free, up_is_free in [
        (0.5, 0.5, 1, 1),
        (2.0, 0.5, 0, 1),
        (-9.0, -3.0, 1, 0),
        (0.5, 1.0, 1, 1),
    ]:
        problem.inputs = [torch.ones(1, 1), torch.ones(1, 1), torch.tensor([[[gate], [up]]]), torch.ones(1, 1, 1)]
        _, grads = gradients(problem.fused, problem.inputs, (torch.ones(1, 1),))
        assert [bool(g) for g in grads[2].flatten()] == [bool(gate_is_free), bool(up_is_free)]


def test_second_derivative() -> None:
    torch.manual_seed(5)
    problem = Problem(4, 6, 3, 2, 2, bias=True)
    check_second_derivative(problem.fused, problem.definition, problem.inputs)


def test_backward_operator_cannot_be_differentiated_silently() -> None:
    problem = Problem(3, 4, 2, 2, 1)
    x, weights, gate_up, down = problem.inputs
    z, grad = torch.randn(3, 4), problem.grad.requires_grad_()
    grads = torch.ops.mindspeed.fused_experts_backward(
        grad, z, x, problem.index, weights, gate_up, None, down, None, False, False, 1.0, torch.inf, 0.0, True
    )
    with pytest.raises(RuntimeError, match="fused_experts_backward has no derivative"):
        grads[0].sum().backward()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({0: torch.ones(3, 9)}, ["x [3, 9]", "gate_up", "[2, 8, 6]"]),
        ({1: torch.ones(3, 3)}, ["top_k_weights", "[3, 3]", "[3, 2]"]),
        ({3: torch.ones(2, 6, 5)}, ["down", "[2, 6, 5]", "2 · intermediate"]),
        ({3: torch.ones(3, 6, 4)}, ["down", "[3, 6, 4]"]),
        ({4: torch.ones(2, 4)}, ["gate_up_bias", "[2, 8]", "[2, 4]"]),
        ({5: torch.ones(1, 6)}, ["down_bias", "[2, 6]", "[1, 6]"]),
        ({2: torch.ones(2, 8, 6).bfloat16()}, ["dtype of x", "Float", "BFloat16"]),
    ],
    ids=["x", "weights", "down", "experts", "gate-up-bias", "down-bias", "dtype"],
)
def test_errors_name_the_arguments(changed: dict[int, Tensor], named: list[str]) -> None:
    problem = Problem(3, 6, 4, 2, 2, bias=True)
    for i, tensor in changed.items():
        problem.inputs[i] = tensor
    with pytest.raises(RuntimeError) as error:
        problem.fused(*problem.inputs)
    assert all(part in str(error.value) for part in ("fused_experts", *named)), error.value


def test_float64_is_exact() -> None:
    problem = Problem(5, 8, 4, 3, 2, torch.float64, bias=True, options=GPT_OSS)
    assert torch.equal(problem.fused(*problem.inputs), problem.definition(*problem.inputs))
