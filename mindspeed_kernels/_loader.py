"""Loads the compiled extension, or says what was built, what is installed and which command mends it."""

from __future__ import annotations

import importlib
import json
import platform
from pathlib import Path
from types import ModuleType

import torch
from packaging.version import Version

PACKAGE = Path(__file__).resolve().parent


def load_extension() -> ModuleType:
    """Import ``mindspeed_kernels._C``, which registers ``torch.ops.mindspeed``.

    Raises:
        ImportError: the extension is missing, was built for a newer torch, or does not load.
        ValueError: ``MINDSPEED_CPU_CAPABILITY`` names no instruction set.
    """
    built = build_info()
    if not any(PACKAGE.glob("_C.*")):
        raise ImportError(_explain("is missing", built))
    # The extension uses torch's stable ABI, which later versions of torch keep and earlier ones do not have in full.
    if "torch" in built and Version(torch.__version__).release < Version(built["torch"]).release:
        raise ImportError(_explain("was built for a newer torch", built))
    try:
        extension = importlib.import_module("mindspeed_kernels._C")
    except ImportError as error:
        raise ImportError(_explain(f"does not load ({error})", built)) from error
    extension.cpu_capability()
    return extension


def build_info() -> dict[str, str]:
    """What the build wrote about itself; empty when nothing was built."""
    try:
        return json.loads((PACKAGE / "_build.json").read_text())
    except FileNotFoundError:
        return {}


def _explain(problem: str, built: dict[str, str]) -> str:
    source = PACKAGE.parent
    if (source / "setup.py").exists():
        command = f"cd {source} && pip install --no-build-isolation --no-deps -e ."
    else:
        command = "pip install --no-deps --force-reinstall ."
    return "\n".join(
        (
            f"The compiled extension mindspeed_kernels._C {problem}.",
            f"  found:     {', '.join(str(path) for path in PACKAGE.glob('_C.*')) or f'no _C.*.so in {PACKAGE}'}",
            f"  built:     {_versions(built) if built else 'no build has left a record'}",
            f"  installed: {_versions({'torch': torch.__version__, 'python': platform.python_version()})}",
            f"  to mend:   {command}   (in the directory of the sources; needs g++ 12 or newer)",
        )
    )


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
