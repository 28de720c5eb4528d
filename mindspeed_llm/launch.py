"""Several ranks on this machine, and how a failing rank tells the user."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mindspeed_llm.errors import DivergedError, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_HANDLED_BY_TORCH = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def report_error(error: BaseException) -> int:
    """Tell the user why this process ends, and return its exit status: 2 if the user can mend it, 1 otherwise.

    Under torchrun or ``launch`` the report goes to the file that they read, so that it is shown once for all ranks.
    """
    status = 2 if isinstance(error, UserError) else 1
    told = isinstance(error, UserError | DivergedError)  # the message says it all
    report = f"error: {error}" if told else "".join(traceback.format_exception(error)).rstrip()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {
            "py_callstack": report,  # what torchrun shows
            "timestamp": str(int(time.time())),
            "time_ns": time.time_ns(),
            "status": status,
        }
        written = Path(f"{path}.part")  # whole or not at all: another rank's failure may end this process meanwhile
        written.write_text(json.dumps({"message": {"message": report, "extraInfo": details}}), encoding="utf-8")
        written.replace(path)
    else:
        print(report, file=sys.stderr)
    return status


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run ``python *arguments`` as ``nproc`` local ranks with torchrun's process starter; returns the exit status.

    A failing rank stops the others, and its error is shown. SIGTERM, SIGINT, SIGHUP and SIGQUIT are passed on as
    SIGTERM: the ranks then end by themselves, however long their last step and checkpoint take. A second SIGINT kills
    them.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would tell each failure again
    # The ranks meet at a store in this process: port 0 is any free one, and no other program can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "OMP_NUM_THREADS": threads,
    }
    handlers = {number: signal.getsignal(number) for number in _HANDLED_BY_TORCH}
    with tempfile.TemporaryDirectory() as folder:  # of the ranks' error files
        context = start_processes(
            "mindspeed_llm",
            sys.executable,
            args=dict.fromkeys(range(nproc), tuple(arguments)),
            envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        asked_to_stop = False

        def stop(number: int, _frame: FrameType | None) -> None:
            nonlocal asked_to_stop
            if asked_to_stop and number == signal.SIGINT:
                context.close(signal.SIGKILL)
            asked_to_stop = True
            for pid in context.pids().values():
                with suppress(ProcessLookupError):  # that rank has left already
                    os.kill(pid, signal.SIGTERM)

        for number in _HANDLED_BY_TORCH:  # its handlers would kill the ranks after 30 seconds
            signal.signal(number, stop)
        try:
            result = context.wait(period=0.1)
        finally:
            context.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert result is not None
    return _show_root_cause(result.failures, asked_to_stop) if result.failures else 0


def _show_root_cause(failures: dict[int, ProcessFailure], asked_to_stop: bool) -> int:
    """Print the error that came first: when one rank goes, the others fail for want of it. Returns the exit status."""
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    report = _report(failure)
    if report is not None:
        is_users = report["status"] == 2
        print(report["py_callstack"] if is_users else f"rank {rank}:\n{report['py_callstack']}", file=sys.stderr)
        return report["status"]
    if asked_to_stop and failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL):
        print("stopped by a signal while not training: there was no step to finish", file=sys.stderr)
    elif failure.exitcode < 0:
        hint = ", as it happens when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        print(f"rank {rank} was killed by {failure.signal_name()}{hint}", file=sys.stderr)
    else:
        print(f"rank {rank} left with exit status {failure.exitcode}", file=sys.stderr)
    return 1


def _order(failure: ProcessFailure) -> tuple[int, int]:
    """A crash without a word cannot be a consequence; then by time; what we ended ourselves comes last."""
    report = _report(failure)
    if report is not None:
        return 1, report["time_ns"]
    return (2, 0) if failure.exitcode == -signal.SIGTERM else (0, 0)


def _report(failure: ProcessFailure) -> dict[str, Any] | None:
    """What ``report_error`` wrote in that rank; its exit code may be another, of a signal that came as it left."""
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else None
