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
from types import FrameType
from typing import TYPE_CHECKING

from mindspeed_llm.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

USER_ERROR_STATUS = 2
_HANDLED_BY_TORCH = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def report_error(error: BaseException) -> int:
    """Tell the user why this process ends, and return its exit status: 2 if the user can mend it, 1 otherwise.

    Under torchrun or ``launch`` the report goes to the file that they read, so that it is shown once for all ranks.
    """
    is_users = isinstance(error, UserError)
    report = str(error) if is_users else "".join(traceback.format_exception(error)).rstrip()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": report, "timestamp": str(int(time.time())), "time_ns": time.time_ns()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": report, "extraInfo": details}}, file)
    else:
        print(f"error: {report}" if is_users else report, file=sys.stderr)
    return USER_ERROR_STATUS if is_users else 1


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run ``python *arguments`` as ``nproc`` local ranks with torchrun's process starter; returns the exit status.

    A failing rank stops the others, and its error is shown. SIGTERM and SIGINT are passed on as SIGTERM: the ranks then
    end by themselves, however long their last step and checkpoint take. A second SIGINT kills them.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would tell each failure again
    # The ranks meet at a store in this process: port 0 is any free one, and no other program can take it in between.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    common = {
        "MASTER_ADDR": "localhost",
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
                os.kill(pid, signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
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
    """Print the error that came first: when one rank goes, the others fail for want of it."""
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    report = _report_of(failure)
    if report is not None and failure.exitcode == USER_ERROR_STATUS:
        print(f"error: {report}", file=sys.stderr)
        return USER_ERROR_STATUS
    if asked_to_stop and failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL):
        print(f"stopped by a signal while rank {rank} was not training", file=sys.stderr)
        return 1
    if report is None:
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"left with {failure.exitcode}"
        hint = ": most often the machine ran out of memory" if failure.exitcode == -signal.SIGKILL else ""
        report = f"it {how}{hint}"
    print(f"rank {rank} of {len(failures)} failed:\n{report}", file=sys.stderr)
    return 1


def _order(failure: ProcessFailure) -> tuple[int, int]:
    """A crash without a word cannot be a consequence; then by time; what we ended ourselves comes last."""
    details = _details(failure)
    if "time_ns" in details:
        return 1, details["time_ns"]
    return (2, 0) if failure.exitcode == -signal.SIGTERM else (0, 0)


def _report_of(failure: ProcessFailure) -> str | None:
    return _details(failure).get("py_callstack")


def _details(failure: ProcessFailure) -> dict:
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else {}
