"""``docs/configuration.md``, written from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mindspeed_llm.config.data_schema import DatasetSource
from mindspeed_llm.config.original import ORIGINAL_KEYS, UNSUPPORTED_VALUES, OriginalKey
from mindspeed_llm.config.schema import Config

_HEAD = """\
# Configuration

This page is made from the program's schema: `python -m mindspeed_llm.config > docs/configuration.md`.

A run is described by one YAML file with the sections `model`, `data`, `parallel`, `training` and `optimization`. Any
key can be given on the command line as well, where its value is YAML too:

    python -m mindspeed_llm.run CONFIG.yaml --training.lr=1e-4 --data.dataset.file_name=more.jsonl

- **Unknown keys** and values of another type are errors that name the line and the key that was probably meant.
- **Numbers** may be written `1e-4`. `1` and `0` are taken for `true` and `false`.
- **Null** is `null`, `~`, `None` or an empty value. It is a value of its own, and an error where a key does not allow
  it; leave a key out to get its default.
- **Paths** that are read are looked up from the folder of the YAML file, then from the current folder. `output_dir` is
  relative to the current folder.
- `--print-config` prints the configuration with every default; a run keeps it as `config.yaml` in its `output_dir`.
"""
_ORIGINAL = """
## Keys of MindSpeed LLM that are no keys here

They are accepted with the values in the middle column, so that YAML files of MindSpeed LLM's FSDP2 backend load
unchanged; other values are errors that say what the last column says.

| key | accepted | why |
|---|---|---|
"""
_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        parts.append(_section(f"`{name}`", field.annotation))
        if name == "data":
            parts.append(_section("`data.dataset` and `data.eval_dataset` as a mapping", DatasetSource, level=3))
    parts.append(
        _ORIGINAL + "".join(f"| `{key}` | {_accepted(what)} | {what.reason} |\n" for key, what in _originals())
    )
    return "".join(parts)


def _section(title: str, section: type[BaseModel], level: int = 2) -> str:
    rows = "".join(
        f"| `{name}` | {describe_type(field)} | {_default(field)} | {_cell(field.description)} |\n"
        for name, field in section.model_fields.items()
    )
    head = f"\n{'#' * level} {title}\n\n{section.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    return head + rows


def describe_type(field: FieldInfo) -> str:
    """Type and limits in words, such as ``whole number > 0 or null``."""
    words, or_null, _ = _words(field.annotation).partition(" or null")
    return words + _limits(field.metadata) + or_null


def _words(annotation: Any) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _words(arguments[0]) + _limits(arguments[1:])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join("null" if argument is NoneType else _words(argument) for argument in arguments)
    if get_origin(annotation) is list:
        return f"list of {_words(arguments[0])}s"
    if get_origin(annotation) is dict or issubclass(annotation, BaseModel):
        return "mapping"
    return _TYPES[annotation]


def _limits(metadata: Iterable[Any]) -> str:
    limits = ((item, name) for item in metadata for name in _SIGNS if hasattr(item, name))
    return ",".join(f" {_SIGNS[name]} {getattr(item, name)}" for item, name in limits)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if field.default is None:
        return "null"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _cell(text: str | None) -> str:
    assert text is not None, "every key has a docstring"
    return " ".join(text.split()).replace("|", r"\|")


def _originals() -> Iterator[tuple[str, OriginalKey]]:
    yield from ORIGINAL_KEYS.items()
    for (key, value), reason in UNSUPPORTED_VALUES.items():
        yield f"{key}: {value}", OriginalKey(reason)


def _accepted(what: OriginalKey) -> str:
    if isinstance(what.accepted, tuple):
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in what.accepted)
    return "anything"
