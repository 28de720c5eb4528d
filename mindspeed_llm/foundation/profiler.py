"""Traces of some steps, by PyTorch's profiler or, on an NPU, torch_npu's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.config import TrainingConfig

logger = logging.getLogger(__name__)


@contextmanager
def profile_steps(config: TrainingConfig, rank: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yields a function that has to be told of each step before it is taken, counted from 0.

    The steps from ``profile_step_start`` on and before ``profile_step_end`` are traced on ``profile_ranks``, in one
    trace, which tensorboard and Perfetto (MindStudio Insight for an NPU's) show.
    """
    wanted = config.profile and (-1 in config.profile_ranks or rank in config.profile_ranks)
    trace: Any = None

    def before_step(step: int) -> None:
        nonlocal trace
        end = config.profile_step_end
        inside = config.profile_step_start <= step and (end == -1 or step < end)
        if wanted and inside and trace is None:
            trace = _profiler(config, rank, device)
            trace.start()
        elif not inside and trace is not None:
            _stop(trace, config)
            trace = None

    try:
        yield before_step
    finally:
        if trace is not None:
            _stop(trace, config)


def _stop(trace: Any, config: TrainingConfig) -> None:
    trace.stop()
    logger.info("profile written to %s", config.profile_save_path)


def _profiler(config: TrainingConfig, rank: int, device: torch.device) -> Any:
    Path(config.profile_save_path).mkdir(parents=True, exist_ok=True)
    profiler: Any = torch.profiler
    options: dict[str, Any] = {}
    if device.type == "npu":
        profiler = import_module("torch_npu.profiler")
        level = getattr(profiler.ProfilerLevel, config.profile_level.capitalize())
        options = {"experimental_config": profiler._ExperimentalConfig(profiler_level=level)}
    kinds = {device.type.upper(), "CPU"} if config.profile_with_cpu else {device.type.upper()}
    return profiler.profile(
        activities=[getattr(profiler.ProfilerActivity, kind) for kind in sorted(kinds)],
        on_trace_ready=profiler.tensorboard_trace_handler(config.profile_save_path, f"rank-{rank}"),
        record_shapes=config.profile_record_shapes,
        profile_memory=config.profile_with_memory,
        with_stack=config.profile_with_stack,
        **options,
    )
