"""The tests of the NPU's Python and host code, run by .ci/ascend: they need the torch_npu wheel and, in CANN's place,
the libraries of build_cann.py. Elsewhere they are not collected."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("torch_npu") else ["test_*.py"]


@pytest.fixture(scope="session")
def device():
    """The NPU of this process."""
    from tests.ascend.device.device import Device

    return Device(Path(os.environ["MINDSPEED_ASCENDC_LIBRARY"]))
