"""How much memory of its own a process takes while something runs."""

from __future__ import annotations

import threading
from pathlib import Path

# For child processes: give every large block back at once, so that what is measured is what is in use.
NO_HOARDING = {"MALLOC_MMAP_THRESHOLD_": "65536"}
SLACK = 4 * 2**20  # Python objects, thread stacks


class PeakMemory:
    """Largest growth, in bytes, of the process's anonymous memory (file pages that are merely mapped do not count)."""

    def __enter__(self) -> PeakMemory:
        self.growth, self._start, self._done = 0, _anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self._sample()

    def _sample(self) -> None:
        self.growth = max(self.growth, _anonymous() - self._start)


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))
