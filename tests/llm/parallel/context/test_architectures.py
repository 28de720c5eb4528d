"""Every architecture for causal language modelling either equals one process or is refused by name, never wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed import launch
from tests.llm.parallel.context.architectures import EQUAL, REFUSED

WORKER = str(Path(__file__).with_name("architectures_worker.py"))


@pytest.mark.slow
def test_architectures_equal_one_process_or_are_refused(tmp_path):
    finished = launch([WORKER, str(tmp_path / "outcomes.json")], 2, timeout=240)
    assert finished.returncode == 0, finished.stderr
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert {name: outcomes[name] for name in EQUAL} == {name: ["equal", "equal"] for name in EQUAL}
    for name, why in REFUSED.items():
        for outcome in outcomes[name]:
            assert re.match(f"refused: parallel.cp_size: .*{why}", outcome), f"{name}: {outcome}"
