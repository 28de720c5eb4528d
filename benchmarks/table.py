"""`python -m benchmarks.table`: every operator against its peers, side by side, with the ratio to the best of them."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import environment, measure
from benchmarks.case import OURS, Case
from benchmarks.operators import OPERATORS, cases
from mindspeed_llm.foundation import host_memory

HEADINGS = ("op", "case", "dtype", "pass", OURS, "best peer", "ratio", "of ceiling", "extra memory", "other peers")
CEILING = "ceiling"


@dataclass(frozen=True)
class Result:
    case: Case
    backward: bool
    times: Mapping[str, float]
    """Seconds, by contestant."""
    ceiling: float
    """The seconds that our case's work takes at the speed of a copy, or of a matrix product."""
    extra_memory: Mapping[str, int]
    """Bytes that tensors hold beyond the results, by contestant."""

    @property
    def peers(self) -> list[tuple[str, float]]:
        """The others and their times, the fastest first."""
        return sorted(((n, t) for n, t in self.times.items() if n != OURS), key=lambda pair: pair[1])

    @property
    def ratio(self) -> float:
        """How many times as long as we the best peer takes."""
        return self.peers[0][1] / self.times[OURS]

    def row(self) -> tuple[str, ...]:
        best, *others = [f"{name} {_ms(time)}" for name, time in self.peers]
        return (
            self.case.op,
            self.case.shape,
            self.case.dtype_name,
            "fwd+bwd" if self.backward else "fwd",
            _ms(self.times[OURS]),
            best,
            f"{self.ratio:.2f}×",
            f"{self.ceiling / self.times[OURS]:.0%}",
            f"{_mb(self.extra_memory[OURS])}, its {_mb(self.extra_memory[self.peers[0][0]])}",
            ", ".join(others),
        )


def run(case: Case, seconds: float) -> Iterator[Result]:
    """Verify and measure the passes of a case; the ceiling is measured side by side with the contestants."""
    problem = case.build()
    for backward in case.passes:
        steps = measure.steps(problem, backward)
        measure.verify(steps, problem.layers)
        work = case.work(backward)
        ceiling = measure.matmul(case.dtype) if work.flops else measure.copy()
        times = measure.medians({**steps, CEILING: ceiling}, seconds)
        share = work.flops / measure.MATMUL_FLOPS if work.flops else work.bytes / measure.COPY_BYTES
        memory = {name: measure.extra_memory(step) for name, step in steps.items()}
        yield Result(case, backward, times, times.pop(CEILING) * share, memory)


def rich_table(results: Sequence[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for result in results:
        table.add_row(*result.row())
    return table


def markdown(results: Sequence[Result]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(result.row() for result in results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--op", choices=OPERATORS, help="one operator instead of all")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases whose name contains this: bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument(
        "--allocator",
        choices=environment.ALLOCATORS,
        default="huge",
        help="keep freed memory in huge pages (default), in small ones, or leave it to glibc",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contestant and pass; default: %(default)s")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args(arguments)
    selected = list(cases(options.op, options.filter))
    if not selected:
        parser.error(f"no case is named so; there are: {'; '.join(map(str, cases(options.op)))}")

    pages = host_memory.huge_pages() if options.allocator == "huge" else {}
    host_memory.restart_with({**environment.openmp(options.threads), **pages})
    if options.allocator != "default":
        host_memory.keep_freed_memory()
    torch.manual_seed(0)
    results = []
    for case in selected:
        for result in run(case, options.seconds):
            results.append(result)
            print(*result.row()[:-1], sep="  ", file=sys.stderr, flush=True)  # the whole takes a quarter of an hour
    print(environment.describe(options.allocator), end="\n\n")
    if options.markdown:
        print(markdown(results))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=180)
        console.print(rich_table(results))


if __name__ == "__main__":
    main()
