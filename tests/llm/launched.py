"""What the ranks do that test_launch.py starts: ``python -m tests.llm.launched CASE``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mindspeed_llm.errors import DataError
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.foundation.signals import stop_on_signal
from mindspeed_llm.launch import report_error


def run(case: str, folder: Path) -> None:
    with start() as distributed:
        CASES[case](distributed, folder)


def add_up(distributed: Distributed, folder: Path) -> None:
    """Every rank takes part in a collective."""
    (total,) = distributed.sum([float(distributed.rank)])
    print(f"sum {total:g} threads {os.environ['OMP_NUM_THREADS']}")


def fail_with(error: Exception):
    """Rank 1 fails while rank 0 waits for it, and then fails too."""

    def case(distributed: Distributed, folder: Path) -> None:
        if distributed.rank == 1:
            raise error
        distributed.barrier()

    return case


def everyone_fails(distributed: Distributed, folder: Path) -> None:
    raise DataError("no row can be used")


def crash(distributed: Distributed, folder: Path) -> None:
    if distributed.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    distributed.barrier()


def step_until_asked(distributed: Distributed, folder: Path) -> None:
    """Like training: a collective per step, and a last word after the step in which the signal came."""
    with stop_on_signal() as stop:
        stopping = 0.0
        while not stopping:
            time.sleep(0.05)
            (stopping,) = distributed.sum([float(stop.requested)])
            (folder / f"stepping-{distributed.rank}").touch()
    time.sleep(1)  # a checkpoint takes its time
    (folder / f"saved-{distributed.rank}").touch()


CASES = {
    "add_up": add_up,
    "bug": fail_with(RuntimeError("rank one has a bug")),
    "bad_data": fail_with(DataError("train.jsonl:7: not JSON")),
    "everyone_fails": everyone_fails,
    "crash": crash,
    "step_until_asked": step_until_asked,
}

if __name__ == "__main__":
    try:
        run(sys.argv[1], Path(sys.argv[2]))
    except Exception as error:
        sys.exit(report_error(error))
