"""What is wrong with given values, in words that help: pydantic's findings, and keys that do not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mindspeed_llm.config.original import ORIGINAL_KEYS
from mindspeed_llm.config.schema import Config
from mindspeed_llm.config.source import Keys, Source, describe

# What other trainers call it; compared by likeness too, so that a misspelt one is still understood.
_OTHER_NAMES = {
    "learning_rate": "training.lr",
    "min_learning_rate": "training.min_lr",
    "lr_scheduler": "training.lr_scheduler_type",
    "batch_size": "training.per_device_train_batch_size",
    "micro_batch_size": "training.per_device_train_batch_size",
    "epochs": "training.num_train_epochs",
    "train_iters": "training.max_steps",
    "clip_grad": "training.max_grad_norm",
    "resume": "training.resume_from_checkpoint",
    "gradient_checkpointing": "parallel.recompute",
    "mixed_precision": "parallel.param_dtype",
    "bf16": "parallel.param_dtype",
    "fp16": "parallel.param_dtype",
    "max_length": "data.cutoff_len",
    "max_seq_length": "data.cutoff_len",
    "seq_length": "data.cutoff_len",
    "tokenizer": "model.tokenizer_name_or_path",
}
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def report_validation(source: Source, error: ValidationError) -> None:
    """Note every problem that pydantic found."""
    for item in error.errors(include_url=False):
        keys = tuple(str(part) for part in item["loc"] if not str(part).startswith("<"))  # the union's tags
        if item["type"] in ("extra_forbidden", "invalid_key"):
            source.report(keys, unknown_key(keys))
        elif keys[-1] == "[key]":  # pydantic's name for the key of a dict, here one of a fixed set
            *around, _ = keys
            source.report(tuple(around), f"unknown key; known here are {item['ctx']['expected']}")
        else:
            source.report(keys, _message(keys, item))


def unknown_key(keys: Keys) -> str:
    """Why there is no such key, and the one that was probably meant."""
    *section, name = keys
    paths = list(key_paths(Config))
    by_name = {path.split(".")[-1]: path for path in paths}
    here = {path.split(".")[-1]: path for path in paths if path.split(".")[:-1] == section}
    elsewhere = [path for path in (*paths, *ORIGINAL_KEYS) if path.split(".")[-1] == name]
    if elsewhere:
        return f"unknown key; it belongs to {' or '.join(elsewhere)}"
    for names, likeness in ((here, 0.75), (by_name | _OTHER_NAMES, 0.8)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=likeness):
            return f"unknown key; did you mean {names[close[0]]}?"
    if len(here) > 12:
        return "unknown key; `python -m mindspeed_llm.config` lists the known ones"
    return f"unknown key; known here are {', '.join(here)}"


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, those of nested mappings included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from key_paths(part, f"{prefix}{name}.")


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def _message(keys: Keys, item: ErrorDetails) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        return "this key is required"
    if kind not in _EXPECTED and not _LIMITS.keys() & context.keys() and kind != "literal_error":
        return item["msg"]  # our own, of a contradiction
    if kind == "literal_error":
        close = difflib.get_close_matches(str(value), re.findall(r"'(.+?)'", context["expected"]), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"must be {context['expected']}, got {describe(value)}{hint}"
    expected = _EXPECTED.get(kind) or " and ".join(f"{_LIMITS[name]} {limit:g}" for name, limit in context.items())
    hint = ""
    if value is None:
        hint = "; leave the key out for its default"
    elif kind == "string_type" and isinstance(value, dict):
        hint = "; put a text with a colon in quotes"
    elif kind == "string_type" and not isinstance(value, list):
        hint = "; put it in quotes"
    elif kind == "list_type" and isinstance(value, str):
        hint = f"; write [{value}]"
    return f"must be {expected}, got {describe(value)}{hint}"
