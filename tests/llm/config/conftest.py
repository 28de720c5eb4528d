from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.config import Config, load_config
from mindspeed_llm.errors import ConfigError

MINIMAL = """\
model:
  model_name_or_path: model
data:
  dataset:
    file_name: train.jsonl
training:
  output_dir: out
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything that ``MINIMAL`` names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    return tmp_path


Load = Callable[..., Config]


@pytest.fixture
def load(folder: Path) -> Load:
    """Loads the YAML text (``MINIMAL`` if it is not given) with overrides."""

    def load_text(*overrides: str, yaml: str = MINIMAL) -> Config:
        path = folder / "run.yaml"
        path.write_text(yaml, encoding="utf-8")
        return load_config(path, overrides)

    return load_text


@pytest.fixture
def error(load: Load, folder: Path) -> Callable[..., str]:
    """Loads what must fail; returns the message without the folder."""

    def message(*overrides: str, yaml: str = MINIMAL) -> str:
        with pytest.raises(ConfigError) as raised:
            load(*overrides, yaml=yaml)
        return str(raised.value).replace(f"{folder}/", "")

    return message
