"""The tests of the NPU's Python and host code, run by .ci/ascend: they need the torch_npu wheel, in CANN's place the
libraries of build_cann.py, and our operators with the kernels' twin. Elsewhere they are not collected."""

import os
from pathlib import Path

import pytest

LIBRARY = os.environ.get("MINDSPEED_ASCENDC_LIBRARY")
collect_ignore_glob = [] if LIBRARY else ["test_*.py"]


@pytest.fixture(scope="session")
def device():
    """The NPU of this process."""
    from tests.ascend.device.device import Device

    return Device(Path(str(LIBRARY)))
