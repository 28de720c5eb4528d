"""The conditions of a measurement. They are the same for all contestants, and part of the result."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

ALLOCATORS = ("huge", "reuse", "default")
"""glibc keeps freed memory, in huge pages (2 MiB) or in small ones (4 KiB); or gives it back, as it does by itself."""

_pinned = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


def openmp(threads: int) -> Mapping[str, str]:
    """What OpenMP has to find in the environment when torch is loaded: unpinned short regions of two threads were often
    seen packed onto one core."""
    return {"OMP_NUM_THREADS": str(threads), **_pinned}


def describe(allocator: str) -> str:
    """One line for the head of a result. More runnable threads than the benchmark's own: the machine was not alone."""
    import mindspeed_kernels._C
    import torch

    pinned = all(os.environ.get(name) == value for name, value in _pinned.items())
    return (
        f"{_cpu()} ({mindspeed_kernels._C.cpu_capability()}), {torch.get_num_threads()} threads"
        f"{' pinned' if pinned else ' not pinned'}, allocator {allocator}, torch {torch.__version__}, "
        f"{os.getloadavg()[0]:.1f} runnable threads on average over the last minute"
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
