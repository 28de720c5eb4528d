"""Which implementation an operator uses on an NPU. Nothing of an NPU is needed to choose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mindspeed_kernels.__main__ import report
from mindspeed_kernels.npu import vendor
from mindspeed_kernels.npu.choice import IMPLEMENTATIONS, OPERATORS, VARIABLE, Choice, read_choice
from mindspeed_kernels.npu.dispatch import OPERATOR_OF, Dispatcher
from mindspeed_kernels.npu.implementation import Implementation


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("", Choice("torch_npu", {})),
        ("ascendc", Choice("ascendc", {})),
        (" reference , rms_norm = ascendc,", Choice("reference", {"rms_norm": "ascendc"})),
        ("rotary=reference,swiglu=ascendc", Choice("torch_npu", {"rotary": "reference", "swiglu": "ascendc"})),
    ],
)
def test_choices_are_read(text: str, choice: Choice):
    assert read_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchnpu", "no implementation 'torchnpu', but torch_npu, ascendc, reference; did you mean torch_npu"),
        ("rms_norm=cuda", "no implementation 'cuda', but torch_npu, ascendc, reference"),
        ("rmsnorm=ascendc", "no operator 'rmsnorm', but flash_attention, .*; did you mean rms_norm"),
        ("ascendc,torch_npu", "'torch_npu' is not operator=implementation"),
        ("swiglu=ascendc,swiglu=reference", "swiglu is chosen twice"),
    ],
)
def test_other_texts_are_errors_that_name_what_is_allowed(text: str, message: str):
    with pytest.raises(ValueError, match=f"MINDSPEED_NPU_IMPL={text}: .*{message}"):
        read_choice(text)


def test_what_does_not_take_a_call_is_passed_over():
    def table(name: str, takes: bool) -> dict[str, Implementation]:
        return {"swiglu": Implementation(lambda *_: takes, lambda *_: name)}

    def name_of(text: str, vendor_takes: bool) -> str | None:
        tables = {"torch_npu": table("torch_npu", vendor_takes), "ascendc": table("ascendc", True)}
        found = Dispatcher(read_choice(text), tables).find("swiglu", torch.empty(2))
        return found and found[0]

    assert [name_of(text, True) for text in ("", "ascendc", "reference")] == ["torch_npu", "ascendc", None]
    assert [name_of(text, False) for text in ("", "ascendc", "swiglu=reference")] == ["ascendc", "ascendc", None]


def test_a_call_that_nothing_takes_is_explained():
    dispatcher = Dispatcher(Choice(), {name: {} for name in IMPLEMENTATIONS[:-1]})
    with pytest.raises(NotImplementedError, match=r"call mindspeed_kernels\.rms_norm"):
        dispatcher.run("add_rms_norm", torch.empty(2))


def test_every_operator_has_a_name_to_choose_it_by():
    assert set(OPERATOR_OF.values()) | {"route"} == set(OPERATORS)
    assert set(vendor.TABLE) == {*OPERATOR_OF, "route"}


def test_the_report_shows_the_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "reference,swiglu=ascendc")
    lines = [line.split() for line in report().splitlines()]
    assert ["swiglu", "ascendc"] in lines
    assert ["rotary", "reference"] in lines


def test_the_npu_is_left_alone_elsewhere():
    code = "import sys, torch, mindspeed_kernels as m; m.rms_norm(torch.ones(2, 4)); print('torch_npu' in sys.modules)"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch's own import of an installed torch_npu
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["False"]
