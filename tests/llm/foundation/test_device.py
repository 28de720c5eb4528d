"""The device, its speed and its random generator."""

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.foundation.device import collective_backend, peak_flops, peak_memory_gib, select_device
from mindspeed_llm.foundation.random_state import get_random_state, set_random_state

CPU = torch.device("cpu")


def test_the_environment_chooses_and_wrong_choices_are_told(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    assert select_device(0) == CPU
    monkeypatch.setenv("MINDSPEED_DEVICE", "tpu")
    with pytest.raises(UserError, match="MINDSPEED_DEVICE=tpu: expected one of cpu, cuda, npu"):
        select_device(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cuda")
    with pytest.raises(UserError, match="no usable cuda device"):
        select_device(0)


def test_host_tensors_always_have_a_backend():
    assert collective_backend(CPU) == "gloo"
    assert collective_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_peaks_are_positive():
    assert peak_flops(CPU, torch.float32) > 1e8
    assert peak_memory_gib(CPU) > 0.01


def test_random_state_goes_through_a_safe_file(tmp_path):
    torch.save(get_random_state(), tmp_path / "state.pt")
    drawn = torch.rand(4)
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(torch.rand(4), drawn)
