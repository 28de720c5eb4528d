"""The AscendC kernels of csrc/ascend: none are built into PyTorch yet."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_kernels.npu.implementation import Implementation


def require() -> None:
    """Raise an ImportError that says why there are no kernels, if there are none."""
    raise ImportError("MINDSPEED_NPU_IMPL asks for ascendc, but this build has no AscendC kernels")


def table() -> Mapping[str, Implementation]:
    return {}
