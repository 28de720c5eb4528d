"""The allocator's set-up: what it does to page faults, and that the program starts again once, as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Ten large tensors' memory, one after the other; prints page faults, and what the process was started with.
PROGRAM = """
import json, os, resource, sys
if "set_up" in sys.argv:
    from mindspeed_llm.foundation import host_memory
    host_memory.set_up(sys.argv[0])

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def allocate():
    bytearray(b"1") * 2**26

allocate()
before = faults()
for _ in range(10):
    allocate()
print(json.dumps([faults() - before, sys.argv, os.getpid(), os.environ.get("GLIBC_TUNABLES")]))
"""


def start(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, list[str], bool, str | None]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    command = [sys.executable, str(program), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=inherited | environment) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    faults, argv, pid, tunables = json.loads(output)
    return faults, argv[1:], pid == process.pid, tunables


def test_freed_memory_is_used_again(tmp_path):
    """Of 640 MiB in all, 160 thousand pages are mapped one by one without it."""
    without, _, _, tunables = start(tmp_path)
    if without < 10_000:
        pytest.skip(f"this machine's allocator keeps freed memory by itself ({without} page faults)")
    assert tunables is None
    faults, argv, same_process, tunables = start(tmp_path, "set_up", "--key=a b")
    assert faults < without / 100
    assert (argv, same_process, tunables) == (["set_up", "--key=a b"], True, "glibc.malloc.hugetlb=1")


def test_an_option_that_the_user_has_set_stays(tmp_path):
    without, *_ = start(tmp_path)
    faults, *_ = start(tmp_path, "set_up", MALLOC_MMAP_MAX_="65536", GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert faults > without / 2


def test_a_process_started_for_another_program_goes_on():
    """A notebook would lose its state."""
    assert run("set_up('mindspeed_llm.run')") == "None"


def test_a_process_starts_again_once():
    """Where the variables do not survive, there would be no end."""
    assert run("restart_with({'LOST': os.urandom(4).hex()})") == "restarted"


def run(call: str) -> str:
    """What a process says that makes the call: whether it was started again."""
    code = f"import os; from mindspeed_llm.foundation.host_memory import *; {call}; "
    code += "print('restarted' if 'MINDSPEED_RESTARTED' in os.environ else None)"
    inherited = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=inherited, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
    ],
)
def test_what_the_user_has_chosen_stays(chosen, expected, tmp_path):
    assert start(tmp_path, "set_up", GLIBC_TUNABLES=chosen)[3] == expected


def test_another_allocator_is_left_alone(tmp_path):
    assert start(tmp_path, "set_up", LD_PRELOAD="/nowhere/libjemalloc.so")[3] is None
