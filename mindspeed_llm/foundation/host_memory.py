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

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h


def set_up() -> None:
    """Call this first in a program: it may start the program again, since glibc reads of huge pages at its start only.

    Does nothing where the C library is another one, or replaced by ``LD_PRELOAD`` (jemalloc, tcmalloc).
    """
    if platform.libc_ver()[0] != "glibc" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return
    restart_with(huge_pages())
    keep_freed_memory()


def huge_pages() -> Mapping[str, str]:
    """The environment that makes glibc ask for huge pages (2 MiB), which Linux by default gives on request.

    In small ones an operator on 40 MB uses ten thousand pages, and finding each in memory costs as much as reading
    some of its lines. A choice that the user has made stays.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))}


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this program again, as the same process, with these variables; unless they are set."""
    if sys.executable and any(os.environ.get(name) != value for name, value in environment.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


def keep_freed_memory() -> None:
    """Make glibc take memory in large pieces and keep it, instead of mapping large blocks one by one."""
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28)):
        if not libc.mallopt(option, value):
            raise OSError(f"mallopt({option}, {value}) failed")
