"""One run at a time writes into an output folder: a killed launcher may have left ranks that still train."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.foundation.distributed import Distributed

_NAME = ".lock"


@contextmanager
def only_writer(output_dir: Path, distributed: Distributed) -> Iterator[None]:
    """While the block runs, rank 0 holds the lock of ``output_dir``; the system drops it however the process ends.

    Raises ConfigError on every rank when another run holds it. Collective.
    """
    descriptor, holder = _acquire(output_dir) if distributed.is_main else (None, None)
    try:
        holder = distributed.gather(holder)[0]
        if holder is not None:
            raise ConfigError(
                f"training.output_dir: another run, {holder}, still writes into {output_dir}: wait for its end, or "
                "stop that process (kill), or choose another training.output_dir"
            )
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _acquire(output_dir: Path) -> tuple[int | None, str | None]:
    """The open file that holds the lock, and who holds it already. Without both there is nothing to lock with: a file
    system without locks, or a folder that can't be written, which is told where the run writes into it."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output_dir / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None, None
    try:
        # Not flock: workers forked by a rank would inherit that, and keep it for a while when the rank is killed.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, os.pread(descriptor, 500, 0).decode(errors="replace").strip() or "its process unknown"
    except OSError:
        return descriptor, None
    with suppress(OSError):  # a full disk: the lock counts, the name is a help
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor, None
