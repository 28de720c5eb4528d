"""Raw values of a configuration and the place where each was given: a line of the YAML file, or an override."""

from __future__ import annotations

import difflib
import re
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mindspeed_llm.errors import ConfigError

Keys = tuple[str, ...]
_OVERRIDE = re.compile(r"--[^\s.=-][^\s.=]*\.")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it was given, and what to do about it."""

    place: str
    message: str

    @property
    def line(self) -> int | None:
        return int(self.place.removeprefix("line ")) if self.place.startswith("line ") else None

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


@dataclass
class Source:
    """Nested values as they were given, before any of them is checked."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _places: dict[Keys, str] = field(default_factory=dict)

    def place(self, keys: Keys) -> str:
        """Where ``keys``, or the mapping around it, was given."""
        while keys and keys not in self._places:
            keys = keys[:-1]
        return self._places.get(keys, "")

    def report(self, keys: Keys, message: str) -> None:
        """Note a problem with the value of ``keys``."""
        self.problems.append(Problem(self.place(keys), f"{'.'.join(keys)}: {message}"))

    def raise_problems(self) -> None:
        """One ConfigError that lists every problem; nothing if there is none."""
        if len(self.problems) == 1:
            problem = self.problems[0]
            raise ConfigError(f"{self.path}{', ' if problem.line else ': '}{problem}")
        if self.problems:
            in_order = sorted(self.problems, key=lambda problem: problem.line or sys.maxsize)
            raise ConfigError(f"{self.path}: {len(in_order)} problems" + "".join(f"\n  {p}" for p in in_order))

    def override(self, text: str) -> None:
        """Apply ``--section.key=value``; the value is YAML, and keys may lead into nested mappings."""
        name, _, value_text = text.removeprefix("--").partition("=")
        keys = tuple(name.split("."))
        if not all(keys):
            self.problems.append(Problem(text, "an override is --section.key=value"))
            return
        try:
            value = yaml.load(value_text, _Loader)
        except yaml.YAMLError as error:
            self.problems.append(Problem(text, f"the value is not YAML ({_reason(error)}); put a text in quotes"))
            return
        node = self.values
        for depth, key in enumerate(keys[:-1], start=1):
            if node.get(key) is None:
                node[key] = {}
                self._places.setdefault(keys[:depth], text)
            if not isinstance(node[key], dict):
                parent, place = ".".join(keys[:depth]), self.place(keys[:depth])
                self.problems.append(Problem(text, f"{parent} is {describe(node[key])} ({place}), it has no keys"))
                return
            node = node[key]
        node[keys[-1]] = value
        self._places = {k: v for k, v in self._places.items() if k[: len(keys)] != keys} | {keys: text}


def read_yaml(path: Path) -> Source:
    """Read a YAML file. Raises ConfigError if it cannot be read as a mapping; doubled keys are noted as problems."""
    source = Source(path)
    try:
        loader = _Loader(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    except yaml.YAMLError as error:  # characters that YAML forbids
        raise ConfigError(f"{path}: not valid YAML: {_reason(error)}") from None
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(node, (), source, set())
        values = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {_reason(error)}") from None
    if not isinstance(values, dict):
        found = "the file is empty" if values is None else f"it holds {describe(values)}"
        raise ConfigError(f"{path}: expected a mapping with the sections model, data, training, ...; {found}")
    source.values = _unshared(values)
    return source


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part ``--section.key=value`` and ``--section.key value`` from other arguments; the former is returned for both.

    Raises ConfigError for an override without a value.
    """
    others: list[str] = []
    overrides: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not _OVERRIDE.match(argument):
            others.append(argument)
        elif "=" in argument:
            overrides.append(argument)
        elif not remaining or remaining[0].startswith("--"):
            raise ConfigError(f"{argument}: the value is missing; write {argument}=value")
        else:
            overrides.append(f"{argument}={remaining.pop(0)}")
    return others, overrides


def describe(value: Any) -> str:
    """A value of a YAML file in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {reprlib.repr(value)}"
    if isinstance(value, list | dict):
        return f"the {'list' if isinstance(value, list) else 'mapping'} {reprlib.repr(value)}"
    return f"the {type(value).__name__} {value}"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, as a type of its own so that nobody's registered tags leak in."""


def _walk(node: yaml.Node, keys: Keys, source: Source, around: set[int]) -> None:
    """Note the line of every key below ``node``, and the keys that are given twice in one mapping."""
    if not isinstance(node, yaml.MappingNode):
        return
    if id(node) in around:
        raise yaml.constructor.ConstructorError(problem="an alias leads into itself", problem_mark=node.start_mark)
    for key_node, value_node in node.value:
        path, line = (*keys, str(key_node.value)), key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if path in source._places:
            name = ".".join(path)
            source.problems.append(Problem(f"line {line}", f"{name}: given twice, first in {source._places[path]}"))
        source._places[path] = f"line {line}"
        _walk(value_node, path, source, around | {id(node)})


def _unshared(value: Any) -> Any:
    """Mappings that an alias put in two places become two: overriding one must not change the other."""
    return {key: _unshared(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{problem}; indent with spaces" if "'\\t'" in problem else problem
