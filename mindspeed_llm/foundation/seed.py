"""Random number generators and determinism."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def set_seed(seed: int, *, deterministic: bool) -> None:
    """Seed Python, NumPy and PyTorch; with ``deterministic`` forbid algorithms that vary from run to run.

    torch's own deterministic mode also fills every fresh tensor with NaN, which costs memory bandwidth and guards only
    against reading uninitialised memory; that part stays off.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
