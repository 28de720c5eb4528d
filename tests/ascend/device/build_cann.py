"""Builds a stand-in for CANN's shared libraries, with which the torch_npu wheel can be imported and has a device.

    python tests/ascend/device/build_cann.py TORCH_NPU_PACKAGE OUTPUT

TORCH_NPU_PACKAGE is the folder ``torch_npu`` of the installed wheel; OUTPUT goes on LD_LIBRARY_PATH. What cann.cpp does
not implement of all that the wheel links to is a function that names itself and fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
FAILING = """
#include <cstdio>
static int fail(const char* name) {{
  std::fprintf(stderr, "%s: the stand-in for CANN does not have it\\n", name);
  return 500000;  // ACL_ERROR_INTERNAL_ERROR
}}
extern "C" {{
{functions}
}}
"""


def undefined_symbols(library: Path) -> set[str]:
    return {line.split()[1] for line in nm("--undefined-only", library) if line.split()[0] == "U"}


def defined_symbols(library: Path) -> set[str]:
    return {line.split()[2] for line in nm("--defined-only", library)}


def nm(option: str, library: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "--dynamic", "--without-symbol-versions", option, library], check=True, capture_output=True, text=True
    )
    return listing.stdout.splitlines()


def is_of_cann(symbol: str) -> bool:
    return symbol.startswith(("acl", "Hccl", "rt", "Msprof", "_ZN3atb", "_ZNK2ge", "_ZN2ge"))


def build(torch_npu: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    wheel = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    headers = (torch_npu / "include" / path for path in ("", "third_party/acl/inc", "third_party/hccl/inc"))
    includes = [f"-isystem{path}" for path in headers]
    library = output / "libcann.so"
    compiler = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", *includes]
    cann = Path(__file__).with_name("cann.cpp")
    subprocess.run([*compiler, str(cann), "-o", str(library)], check=True)

    provided = defined_symbols(library).union(*map(defined_symbols, wheel))
    missing = sorted(filter(is_of_cann, set().union(*map(undefined_symbols, wheel)) - provided))
    functions = "\n".join(f'int {symbol}() {{ return fail("{symbol}"); }}' for symbol in missing)
    failing = output / "failing.cpp"
    failing.write_text(FAILING.format(functions=functions))
    subprocess.run([*compiler, str(cann), str(failing), "-o", str(library)], check=True)
    for name in LIBRARIES:
        link = output / f"lib{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
