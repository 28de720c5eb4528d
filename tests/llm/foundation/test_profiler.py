"""Traces of the steps that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.foundation.profiler import profile_steps


def traced_steps(folder: Path, steps: int = 5, **options) -> list[int]:
    """Which steps of a run appear in the traces of rank 1. Step n is a sum of n + 3 elements."""
    config = TrainingConfig(output_dir="", profile_save_path=str(folder), profile_record_shapes=True, **options)
    with profile_steps(config, 1, torch.device("cpu")) as before_step:
        for step in range(steps):
            before_step(step)
            torch.ones(step + 3).sum()
    traces = [json.loads(path.read_text()) for path in folder.glob("rank-1*.json")]
    events = [event for trace in traces for event in trace["traceEvents"] if event.get("name") == "aten::sum"]
    return sorted({event["args"]["Input Dims"][0][0] - 3 for event in events})


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"profile_step_start": 1, "profile_step_end": 3}, [1, 2]),
        ({"profile_step_start": 3}, [3, 4]),
        ({"profile_step_start": 1, "profile_step_end": 3, "profile_ranks": [0]}, []),
    ],
)
def test_the_steps_that_were_asked_for(tmp_path: Path, options: dict, steps: list[int]):
    assert traced_steps(tmp_path / "traces", profile=True, **options) == steps


def test_nothing_by_default(tmp_path: Path):
    assert traced_steps(tmp_path / "traces") == []
    assert not (tmp_path / "traces").exists()
