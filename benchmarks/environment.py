"""The conditions of a measurement. They are the same for all contestants, and part of the result."""

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

ALLOCATORS = ("huge", "reuse", "default")
"""glibc keeps freed memory, in huge pages (2 MiB) or in small ones (4 KiB); or gives it back, as it does by itself."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_pinned = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


def keep_freed_memory() -> None:
    """Make glibc keep what is freed instead of returning large blocks to the kernel.

    Otherwise every fresh large output is paid for in page faults, at a fifth of the speed of memory: then one measures
    the kernel clearing pages, for whoever happens to allocate them. A trainer would ask for the same.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28)):
        if not libc.mallopt(option, value):
            raise OSError(f"mallopt({option}, {value}) failed")


def openmp(threads: int) -> Mapping[str, str]:
    """What OpenMP has to find in the environment when torch is loaded: unpinned short regions of two threads were often
    seen packed onto one core."""
    return {"OMP_NUM_THREADS": str(threads), **_pinned}


def huge_pages() -> Mapping[str, str]:
    """What makes glibc ask for huge pages, where the kernel gives them on request (`madvise`).

    In small ones an operator on 40 MB uses ten thousand pages, and finding each in memory costs as much as reading
    some of its lines: one then measures the processor walking page tables.
    """
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this program again with these variables, unless they are set."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


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
