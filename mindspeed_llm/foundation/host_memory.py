"""The C library's allocator, set up once for the process: it keeps what is freed, in huge pages where there are any.

By itself glibc returns every large block to the kernel and asks for it anew, zeroed and mapped page by page (4 KiB),
at a fifth of the speed of memory. A training step allocates the same large tensors again and again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping

# As the environment names them: mallopt's number in malloc.h, and the value.
_OPTIONS = {"mmap_max": (-4, 0), "trim_threshold": (-1, 2**31 - 1), "top_pad": (-2, 2**28)}
_RESTARTED = "MINDSPEED_RESTARTED"


def set_up(program: str) -> None:
    """Call this first in the module or script ``program``: the process may start again, since glibc reads of huge pages
    at its start only. It does not if it was started for something else, such as a notebook.

    What the environment says of the allocator stays. Does nothing where the C library is another one, or replaced by
    ``LD_PRELOAD`` (jemalloc, tcmalloc).
    """
    if platform.libc_ver()[0] != "glibc" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return
    if program in sys.orig_argv:
        restart_with(huge_pages())
    keep_freed_memory()


def huge_pages() -> Mapping[str, str]:
    """The environment that makes glibc ask for huge pages (2 MiB), which Linux by default gives on request.

    In small ones an operator on 40 MB uses ten thousand pages, and finding each in memory costs as much as reading
    some of its lines.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))}


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this program again, once, as the same process, with these variables; unless they are set."""
    again = {_RESTARTED: str(os.getpid())}  # where the variables do not survive, this ends it
    if not sys.executable or os.environ.get(_RESTARTED) == again[_RESTARTED]:
        return
    if any(os.environ.get(name) != value for name, value in environment.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment, **again})


def keep_freed_memory() -> None:
    """Make glibc take memory in large pieces and keep it, instead of mapping large blocks one by one."""
    libc = ctypes.CDLL(None)
    for name, (option, value) in _OPTIONS.items():
        if f"glibc.malloc.{name}=" in os.environ.get("GLIBC_TUNABLES", "") or f"MALLOC_{name.upper()}_" in os.environ:
            continue
        if not libc.mallopt(option, value):
            raise OSError(f"mallopt({option}, {value}) failed")
