"""Builds the C++ side of these tests and calls it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ascend-tests"


@dataclass(frozen=True)
class Report:
    """What a launch on the twin reported."""

    errors: list[str]
    sync_sites: list[str]
    counters: dict[str, int]


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"


@cache
def twin_tests() -> ctypes.CDLL:
    """The library of the twin's own tests, built if its sources are newer."""
    configure = ("-S", "csrc/ascend", "-B", str(BUILD), "-G", "Ninja", "-DMINDSPEED_ASCEND_TESTS=ON")
    _run(sys.executable, "-m", "cmake", *configure)
    _run(sys.executable, "-m", "cmake", "--build", str(BUILD), "--target", "ascend_twin_tests", "--parallel", "1")
    return ctypes.CDLL(str(BUILD / "libascend_twin_tests.so"))


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
