"""What a resumed run has set otherwise than the run before it."""

from __future__ import annotations

from pathlib import Path

import yaml

from mindspeed_llm.config.schema import Config

_OF_THE_START = "training.resume_from_checkpoint"  # says how a run begins, not what it does


def changes_since(kept: Path, config: Config) -> list[str]:
    """``section.key: before -> now`` for each key in which ``config`` differs from a run's kept ``config.yaml``.

    Empty when there is none that can be read: it may come from another version.
    """
    try:
        before = yaml.safe_load(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    if not isinstance(before, dict):
        return []
    return [
        f"{section}.{key}: {before[section][key]} -> {value}"
        for section, values in config.model_dump().items()
        if isinstance(before.get(section), dict)
        for key, value in values.items()
        if f"{section}.{key}" != _OF_THE_START and before[section].get(key, value) != value
    ]
