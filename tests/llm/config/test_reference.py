"""The documentation is the schema's, and the schema has no key that nothing reads."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import mindspeed_llm
from mindspeed_llm.config import Config
from mindspeed_llm.config.reference import markdown

PACKAGE = Path(mindspeed_llm.__file__).parent


def test_the_page_is_up_to_date() -> None:
    page = PACKAGE.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == markdown(), "python -m mindspeed_llm.config > docs/configuration.md"


def test_the_page_describes_types_defaults_and_limits() -> None:
    page = markdown()
    assert "| `fsdp_size` | whole number > 0 or null | null | Ranks that share" in page
    assert "| `adam_beta2` | number ≥ 0, < 1 | `0.95` |" in page
    assert "| `param_dtype` | `bf16`, `fp32` | `bf16` |" in page
    assert "| `output_dir` | text | **required** |" in page
    assert "| `parallel.tp_size` | `1` | tensor parallelism" in page


@cache
def keys_read() -> set[tuple[str, str]]:
    """``(owner, name)`` of every attribute that the package reads outside of the schema, such as ``training.lr``."""
    reads: set[tuple[str, str]] = set()
    schema = [path for path in (PACKAGE / "config").glob("*.py") if path.name != "world.py"]
    for path in set(PACKAGE.rglob("*.py")) - set(schema):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                reads.add((name, node.attr))
    return reads


@pytest.mark.parametrize("section", list(Config.model_fields))
def test_every_key_is_read_by_the_program(section: str) -> None:
    keys = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    reads = keys_read()
    unread = [key for key in keys if not {(section, key), ("config", key), ("options", key)} & reads]
    assert unread == []
