"""Sets the conditions before torch is loaded, which fixes OpenMP's."""

import os

from benchmarks import environment
from mindspeed_llm.foundation.host_memory import keep_freed_memory

os.environ.update(environment.openmp(len(os.sched_getaffinity(0))))
keep_freed_memory()


def pytest_report_header() -> str:
    return f"benchmarks: {environment.describe('reuse')}"
