"""The compiled extension: what it needs of libtorch, and what a user reads when it does not load."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools

from mindspeed_kernels import _C
from mindspeed_kernels._loader import PACKAGE

EXTENSION = Path(_C.__file__)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_uses_only_the_stable_abi() -> None:
    """No symbol of at:: or c10::, so that one build serves later versions of torch."""
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", EXTENSION], check=True, capture_output=True, text=True
    ).stdout
    assert "torch_parallel_for" in symbols
    assert [s for s in symbols.split() if re.match(r"_ZN?K?(TV|TI|TS)?N?K?(2at|3c10|5torch)", s)] == []


def _remove(package: Path) -> None:
    (package / EXTENSION.name).unlink()
    (package / "_build.json").unlink()


def _break(package: Path) -> None:
    (package / EXTENSION.name).write_bytes(b"not a shared library")


def _build_for_newer_torch(package: Path) -> None:
    build = json.loads((package / "_build.json").read_text())
    (package / "_build.json").write_text(json.dumps({**build, "torch": "99.0.0"}))


def test_a_build_without_cann_leaves_no_kernels_of_a_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: arguments.update(kwargs))
    runpy.run_path(str(PACKAGE.parent / "setup.py"))
    build = arguments["cmdclass"]["build_ext"](setuptools.Distribution({"packages": ["mindspeed_kernels"]}))
    monkeypatch.chdir(tmp_path)
    package, built = tmp_path / "mindspeed_kernels", tmp_path / "lib" / "mindspeed_kernels"
    for folder, files in ((package, ("_ascendc.so", "_C.abi3.so")), (built, ("_build.json",))):
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).touch()
    build.build_lib, build.extensions = str(tmp_path / "lib"), []
    build.copy_extensions_to_source()
    assert [file.name for file in package.iterdir()] == ["_build.json"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_remove, ["is missing", "no _C.*.so", "no build has left a record"]),
        (_break, ["does not load", EXTENSION.name, "built:     torch"]),
        (_build_for_newer_torch, ["was built for a newer torch", "built:     torch 99.0.0"]),
    ],
)
def test_import_error_says_how_to_mend_it(tmp_path: Path, damage: Callable[[Path], None], says: list[str]) -> None:
    package = tmp_path / "mindspeed_kernels"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    damage(package)
    result = subprocess.run(
        [sys.executable, "-c", "import mindspeed_kernels"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    for part in ("ImportError", "installed: torch", "pip install", *says):
        assert part in result.stderr, result.stderr
