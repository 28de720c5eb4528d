"""The examples of docs/data.md run, in order."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 15
    monkeypatch.chdir(tmp_path)
    for folder in ("examples", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # an example adds to it
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "Add the numbers.\n1 and 2<|im_end|>" in shown
    assert '[[Action: get_weather\nAction Input: {"town": "Brem"}<|im_end|>' in shown
    assert "[[Good morning!<|im_end|>" in shown
    assert re.search(r"Q: .*\nA:\[\[ .*<\|im_end\|>", shown)
    assert "broken.jsonl:2: no column 'output'" in shown
    assert shown.count("detailed thinking off") == 1  # by parity
    assert "rows left out because they are longer than cutoff_len" in shown
    assert "--- next document ---" in shown
    assert "data train: 108 rows read -> 125 rows of 108 documents, 8000 tokens, 7893 trained on" in shown
