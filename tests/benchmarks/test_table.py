"""The benchmark compares like with like, by turns, and reports what it measured."""

import functools
import time

import pytest
import torch

from benchmarks import measure, table
from benchmarks.case import COMPILED, EAGER, OURS, Case, Problem, Work
from benchmarks.operators import (
    OPERATORS,
    adamw,
    cases,
    flash_attention,
    linear_cross_entropy,
    muon,
    rms_norm,
    rotary,
    swiglu,
)


def without_compiler(problem: Problem) -> Problem:
    contestants = {name: f for name, f in problem.contestants.items() if name != COMPILED}
    return Problem(problem.arguments, problem.leaves, contestants)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize(
    "build",
    [
        functools.partial(linear_cross_entropy.problem, 24, 32, 100),
        functools.partial(flash_attention.problem, (16, 9), 16),
        functools.partial(rms_norm.problem, 48, 32),
        functools.partial(rotary.problem, 24, 4, 2, 16),
        functools.partial(swiglu.problem, 24, 32),
    ],
    ids=["linear_cross_entropy", "flash_attention", "rms_norm", "rotary", "swiglu"],
)
def test_contestants_compute_the_same(build, dtype, backward):
    steps = measure.steps(without_compiler(build(dtype)), backward)
    assert {EAGER, OURS} <= steps.keys()
    measure.verify(steps)


@pytest.mark.parametrize("problem", [adamw.problem(2, 8), muon.problem(40)], ids=["adamw_step_", "muon"])
def test_optimizers_take_the_same_step(problem):
    measure.verify(measure.steps(problem, backward=False))


@pytest.mark.parametrize("backward", [False, True], ids=["value", "gradient"])
def test_a_contestant_that_computes_something_else_is_refused(backward):
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.randn(64, requires_grad=True)
    wrong = WrongGradient.apply if backward else torch.tanh
    steps = measure.steps(Problem((x,), [x], {EAGER: torch.sin, OURS: wrong}), backward)
    with pytest.raises(AssertionError, match=f"{OURS} does not compute what {EAGER} computes"):
        measure.verify(steps)


def test_contestants_take_turns_in_changing_order():
    calls = []
    measure.medians({name: functools.partial(calls.append, name) for name in "abc"}, seconds=0)
    rounds = [tuple(calls[i : i + 3]) for i in range(6, len(calls), 3)]  # after two calls of each to warm up
    assert len(rounds) == 7
    assert {frozenset(r) for r in rounds} == {frozenset("abc")}
    assert len(set(rounds)) > 1


def test_medians_are_seconds():
    steps = {name: functools.partial(time.sleep, s) for name, s in (("fast", 0.001), ("slow", 0.004))}
    medians = measure.medians(steps, seconds=0.03)
    assert 0.001 <= medians["fast"] < 0.004 <= medians["slow"]


def test_extra_memory_is_what_a_step_holds_and_does_not_return():
    def step():
        kept = [torch.ones(1 << 20) for _ in range(3)]  # 4 MiB each
        return (torch.stack(kept).sum(0),)

    assert 6 << 22 <= measure.extra_memory(step) < 7 << 22  # and the stack of all three; not the sum


def test_ratio_and_share_of_the_ceiling():
    case = Case("rms_norm", "8x8", torch.bfloat16, Work(bytes=100), Work(bytes=200), lambda: None)
    times, memory = {EAGER: 0.009, COMPILED: 0.004, OURS: 0.002}, {EAGER: 9, COMPILED: 40_000_000, OURS: 10_000_000}
    result = table.Result(case, True, times, ceiling=0.001, extra_memory=memory)
    assert case.work(backward=True).bytes == 300
    assert result.row() == (
        "rms_norm", "8x8", "bfloat16", "fwd+bwd", "2.00 ms", "HF compiled 4.00 ms", "2.00×", "50%",
        "10 MB, its 40 MB", "HF eager 9.00 ms",
    )  # fmt: skip
    heading, rule, row = table.markdown([result]).splitlines()
    assert heading.count("|") == rule.count("|") == row.count("|")


def test_cases_are_found_by_operator_and_name():
    assert {case.op for case in cases()} == OPERATORS.keys()
    assert [str(case) for case in cases("swiglu", "float32")] == ["swiglu 4096x3072 float32"]


def test_an_unknown_case_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        table.main(["--op", "swiglu", "--filter", "int8"])
    assert "there are: swiglu 4096x3072 bfloat16; swiglu 4096x3072 float32" in capsys.readouterr().err
