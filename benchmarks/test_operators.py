"""The cases of `benchmarks.operators` under pytest-benchmark: a group for each case and pass."""

import pytest

from benchmarks import measure
from benchmarks.case import COMPILED, EAGER, OURS
from benchmarks.operators import cases

CONTESTANTS = (
    OURS,
    COMPILED,
    EAGER,
    "HF grouped_mm",
    "SDPA",
    "F.grouped_mm",
    "matmul of each expert",
    "gather",
    "index_add_",
    "eager, half-precision logits",
    "F.rms_norm",
    "torch fused",
    "torch foreach",
    "DeepSpeed CPU Adam",
    "torch.optim.Muon",
)


@pytest.fixture(scope="module", params=cases(), ids=str)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def problem(case):
    return case.build()


@pytest.fixture(scope="module", params=["fwd", "fwd+bwd"])
def group(case, problem, request):
    if request.param == "fwd+bwd" and not case.backward:
        pytest.skip(f"{case.op} has no backward")
    steps = measure.steps(problem, backward=request.param == "fwd+bwd")
    measure.verify(steps, problem.layers)
    return f"{case}, {request.param}", steps


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_operator(benchmark, case, group, contestant):
    name, steps = group
    if contestant not in steps:
        pytest.skip(f"{case.op} has no {contestant}")
    benchmark.group = name
    benchmark.pedantic(steps[contestant], rounds=20, warmup_rounds=3)
