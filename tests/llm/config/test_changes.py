"""What a resumed run is told of settings that are not those of the run before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.config import Config, load_config
from mindspeed_llm.config.changes import changes_since

from .conftest import MINIMAL


@pytest.fixture
def config(folder: Path) -> Config:
    (folder / "run.yaml").write_text(MINIMAL)
    return load_config(folder / "run.yaml")


def test_every_key_that_differs_is_named(config: Config, folder: Path) -> None:
    kept = folder / "kept.yaml"
    kept.write_text(config.dump_yaml())
    assert changes_since(kept, config) == []
    options = ["--training.lr=1e-3", "--parallel.ep_size=2", "--training.resume_from_checkpoint=auto"]
    changed = load_config(folder / "run.yaml", options)
    lr = config.training.lr
    assert changes_since(kept, changed) == ["parallel.ep_size: 1 -> 2", f"training.lr: {lr} -> 0.001"]


@pytest.mark.parametrize(
    "content", [None, "", "- a", "training: 3", "training: {of_another_version: 1}", "a: [", b"\xff"]
)
def test_what_cannot_be_compared_is_left_out(config: Config, folder: Path, content: str | bytes | None) -> None:
    kept = folder / "kept.yaml"
    if content is not None:
        kept.write_bytes(content.encode() if isinstance(content, str) else content)
    assert changes_since(kept, config) == []
