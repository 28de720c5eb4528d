"""Module name patterns of the YAML: ``model.layers.{*}``, ``model.layers.{0-3}``, ``*.mlp``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from mindspeed_llm.errors import ConfigError

_TOKEN = re.compile(r"\{\*\}|\{(\d+)-(\d+)\}|\{(\d+)\}|\*|\?")


def match_modules(model: nn.Module, patterns: Iterable[str], key: str) -> list[tuple[str, nn.Module]]:
    """Modules of ``model`` whose full name matches a pattern, in the model's order.

    ``{*}`` is any index, ``{a-b}`` an index in that closed range, ``*`` any characters but a dot at the end of a
    pattern or between dots, any characters at its start; ``?`` one character.

    Raises ConfigError when a pattern matches nothing: a misspelt plan must not train silently without effect.
    """
    names = [name for name, _ in model.named_modules() if name]
    selected: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if matches(name, pattern)}
        if not matched:
            raise ConfigError(f"parallel.{key}: no module matches {pattern!r}; modules are for instance {names[:6]}")
        selected |= matched
    return [(name, module) for name, module in model.named_modules() if name in selected]


def matches(name: str, pattern: str) -> bool:
    """Does the full module ``name`` match ``pattern``?"""
    expression, position, ranges = "", 0, []
    for token in _TOKEN.finditer(pattern):
        expression += re.escape(pattern[position : token.start()])
        position = token.end()
        if token[0] == "{*}":
            expression += r"\d+"
        elif token[1] is not None:
            ranges.append((int(token[1]), int(token[2])))
            expression += r"(\d+)"
        elif token[3] is not None:
            expression += token[3]
        elif token[0] == "*":
            expression += ".*" if token.start() == 0 else r"[^.]*"
        else:
            expression += "[^.]"
    found = re.fullmatch(expression + re.escape(pattern[position:]), name)
    return found is not None and all(
        low <= int(i) <= high for i, (low, high) in zip(found.groups(), ranges, strict=True)
    )
