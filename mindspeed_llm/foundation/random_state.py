"""The state of every random generator of a process, in types that ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from mindspeed_llm.foundation.device import device_random_state, set_device_random_state


def get_random_state() -> dict[str, Any]:
    """States of Python, NumPy, PyTorch on the host and PyTorch on this process's device."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "device": device_random_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators back to what ``get_random_state`` returned."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        set_device_random_state(state["device"])
