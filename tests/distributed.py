"""Launch a script on several local ranks, with a free port and a time-out that kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def launch(
    args: Sequence[str], nproc: int, *, timeout: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``args`` (``["script.py", ...]`` or ``["-m", "module", ...]``) on ``nproc`` ranks through torchrun.

    Returns the finished process whatever its exit status, so that a test can look at both; a job that outlives
    ``timeout`` seconds is killed with all its ranks and fails the test.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *args]
    return run(command, timeout=timeout, env=env)


def run(
    command: Sequence[str], *, timeout: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with captured text that kills the whole process group when the time is over."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{' '.join(command)} still ran after {timeout} s\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
