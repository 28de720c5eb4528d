"""Conditions of every test."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Under pytest-xdist a worker has one core: OpenMP's threads of several would wait for one another, spinning."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
