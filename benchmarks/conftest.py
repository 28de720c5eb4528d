"""Sets the conditions before torch is loaded, which fixes OpenMP's."""

import os

from benchmarks import environment

os.environ.update(environment.openmp(len(os.sched_getaffinity(0))))
environment.keep_freed_memory()


def pytest_report_header() -> str:
    return f"benchmarks: {environment.describe('reuse')}"
