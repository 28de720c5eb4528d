"""Who may write into an output folder: one run, until its process ends in whatever way."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.output_lock import only_writer
from tests.distributed import REPOSITORY

# Like a rank with a worker of its data loader, which outlives it for some seconds.
_HOLDER = """
import os, sys, time
from pathlib import Path
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.output_lock import only_writer
with start() as distributed, only_writer(Path(sys.argv[1]), distributed):
    if os.fork():
        print("holds", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def distributed() -> Iterator[Distributed]:
    with start() as distributed:
        yield distributed


def test_a_killed_run_leaves_no_lock(tmp_path: Path, distributed: Distributed) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "out")],
        stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        named = f"another run, process {holder.pid} on {socket.gethostname()}, still writes into {tmp_path / 'out'}: "
        for _ in range(2):  # being refused takes nothing from the holder
            with pytest.raises(ConfigError, match=named), only_writer(tmp_path / "out", distributed):
                pass
        holder.kill()
        holder.wait()
        with only_writer(tmp_path / "out", distributed):
            assert (tmp_path / "out" / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    finally:
        os.killpg(holder.pid, 9)
        if holder.stdout is not None:
            holder.stdout.close()


def test_without_locks_in_the_file_system_a_run_goes_on(
    tmp_path: Path, distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with only_writer(tmp_path, distributed):
        pass
