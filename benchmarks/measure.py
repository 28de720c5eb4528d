"""Run contestants side by side: first they show that they compute the same, then they take turns."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.case import Outputs, Problem

# Units in the last place. bfloat16: eager code rounds several times where others round once. float32: gradients of
# parameters are sums over thousands of tokens, taken in any order.
TOLERANCE = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 128}

Step = Callable[[], tuple[Tensor, ...]]


def steps(problem: Problem, backward: bool) -> dict[str, Step]:
    """What is timed of each contestant: a call, and with `backward` the gradients of all leaves."""
    if not backward:
        return {name: partial(_forward, f, problem) for name, f in problem.contestants.items()}
    with torch.no_grad():
        outputs = _as_tuple(next(iter(problem.contestants.values()))(*problem.arguments))
        cotangents = [torch.randn_like(output) for output in outputs]
    return {name: partial(_backward, f, problem, cotangents) for name, f in problem.contestants.items()}


def verify(steps: Mapping[str, Step], layers: int = 1) -> None:
    """Raise AssertionError if a contestant's results are not those of the first, up to the rounding of each layer.

    The root mean square of the difference is held against that of the result: single elements of a sum of rounded
    products, which cancel, are off by more than their own last place. Each element is for the tests to judge.
    """
    (first, reference), *others = steps.items()
    expected = reference()
    for name, step in others:
        for i, (actual, wanted) in enumerate(zip(step(), expected, strict=True)):
            allowed = layers * TOLERANCE[wanted.dtype] * torch.finfo(wanted.dtype).eps
            error = ((actual.float() - wanted.float()).norm() / wanted.float().norm()).item()
            if not error <= allowed:  # nor NaN
                difference = f"result {i} is {error:.1e} off, allowed {allowed:.1e}"
                raise AssertionError(f"{name} does not compute what {first} computes: {difference}")


def medians(steps: Mapping[str, Step], seconds: float, rounds: int = 7) -> dict[str, float]:
    """The median time of each step in seconds. All take turns, in one process, for `seconds` each on average and at
    least `rounds` times.

    Side by side is the only fair way: absolute times of one machine move by 15 % and more from minute to minute. The
    order changes from round to round, so that nobody always finds the caches as the same other one left them.
    """
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    end = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < end or len(times[order[0]]) < rounds:
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def extra_memory(step: Step) -> int:
    """The most bytes that tensors hold at a time while a step runs, beyond those that it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    held = list(itertools.accumulate(changes, initial=0))
    del returned  # counted in the last of them
    return max(held) - held[-1]


COPY_BYTES = 1 << 27  # twice 64 MiB: read and written
MATMUL_FLOPS = 2 * 2048**3


def copy() -> Step:
    """A copy of `COPY_BYTES / 2` into memory that is there already."""
    source, target = (torch.ones(COPY_BYTES // 2, dtype=torch.uint8) for _ in range(2))
    return lambda: (target.copy_(source),)


def matmul(dtype: torch.dtype) -> Step:
    """A product of square matrices, of `MATMUL_FLOPS`."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return lambda: (a @ b,)


def _forward(f: Callable[..., Outputs], problem: Problem) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return _as_tuple(f(*problem.arguments))


def _backward(f: Callable[..., Outputs], problem: Problem, cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(_as_tuple(f(*problem.arguments)), problem.leaves, cotangents)


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
