"""From a YAML file and command-line overrides to a checked ``Config``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindspeed_llm.config.files import resolve_files
from mindspeed_llm.config.original import ORIGINAL_KEYS, UNSUPPORTED_VALUES
from mindspeed_llm.config.problems import report_validation
from mindspeed_llm.config.schema import Config
from mindspeed_llm.config.source import Source, read_yaml, split_overrides
from mindspeed_llm.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file ``path`` and apply ``--section.key=value`` (or ``--section.key``, ``value``) overrides.

    Paths that are read become absolute. Raises one ConfigError that lists everything that is wrong.
    """
    others, overrides = split_overrides(overrides)
    if others:
        raise ConfigError(f"{others[0]}: not an override, which is --section.key=value")
    source = read_yaml(Path(path))
    for override in overrides:
        source.override(override)
    for section in Config.model_fields:  # one that is left empty has only defaults
        if source.values.get(section) is None:
            source.values[section] = {}
    _settle_original_keys(source, source.values)
    resolve_files(source)
    try:
        config = Config.model_validate(source.values)
    except ValidationError as error:
        report_validation(source, error)
    source.raise_problems()
    return config


def _settle_original_keys(source: Source, values: dict[str, Any], prefix: tuple[str, ...] = ()) -> None:
    """Take out the keys of the original that are no keys here; note those that ask for something."""
    for name, value in list(values.items()):
        keys = (*prefix, str(name))
        path = ".".join(keys)
        if path in ORIGINAL_KEYS:
            if not ORIGINAL_KEYS[path].accepts(value):
                source.report(keys, ORIGINAL_KEYS[path].reason)
            del values[name]
        elif isinstance(value, dict):
            _settle_original_keys(source, value, keys)
        elif isinstance(value, str) and (path, value) in UNSUPPORTED_VALUES:
            source.report(keys, UNSUPPORTED_VALUES[path, value])
            del values[name]
