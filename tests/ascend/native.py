"""Builds the C++ side of these tests and calls it."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_kernels.ascend_twin import AscendTwin, Report

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MINDSPEED_ASCEND_BUILD", ROOT / "build" / "ascend-tests"))


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"


@cache
def build() -> Path:
    """Where the libraries are, built if their sources are newer. MINDSPEED_SANITIZE names sanitizers to build with;
    such a build goes into a folder of its own, MINDSPEED_ASCEND_BUILD."""
    sanitize = os.environ.get("MINDSPEED_SANITIZE", "")
    options = (
        "-DMINDSPEED_ASCEND_TESTS=ON",
        f"-DMINDSPEED_OUTPUT_DIRECTORY={BUILD}",
        f"-DMINDSPEED_SANITIZE={sanitize}",
    )
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers of this run of pytest build it too
        _run(sys.executable, "-m", "cmake", "-S", "csrc/ascend", "-B", str(BUILD), "-G", "Ninja", *options)
        _run(sys.executable, "-m", "cmake", "--build", str(BUILD), "--parallel", "2")
    return BUILD


@cache
def twin_tests() -> ctypes.CDLL:
    """The library of the twin's own tests."""
    return ctypes.CDLL(str(build() / "_ascend_twin_tests.so"))


def kernels(**options: Any) -> AscendTwin:
    """The AscendC kernels on the twin."""
    return AscendTwin(build() / "_ascend_twin.so", **options)


def json_of(function: Any, *arguments: Any) -> Any:
    """Calls a C function that returns JSON in a string from malloc."""
    function.restype = ctypes.c_void_p
    address = function(*arguments)
    try:
        return json.loads(ctypes.string_at(address))
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(address))


def report_of(function: Any, *arguments: Any) -> Report:
    return Report(**json_of(function, *arguments))
