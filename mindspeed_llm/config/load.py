"""From a YAML file and command-line overrides to a checked ``Config``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from mindspeed_llm.config.schema import Config
from mindspeed_llm.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` and apply ``--section.key=value`` overrides, whose values are YAML."""
    raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    for override in overrides:
        name, _, text = override.removeprefix("--").partition("=")
        *parents, key = name.split(".")
        node = raw
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = yaml.safe_load(text)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
