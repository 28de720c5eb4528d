"""Finds the implementation of a call, and registers the operators for PyTorch's PrivateUse1, the NPU's key."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.npu import ascendc, vendor
from mindspeed_kernels.npu.choice import IMPLEMENTATIONS, VARIABLE, Choice, read_choice
from mindspeed_kernels.npu.implementation import Implementation

# torch.ops.mindspeed.<key> belongs to the operator <value> of MINDSPEED_NPU_IMPL.
OPERATOR_OF = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rms_norm_backward": "rms_norm",
    "rotary": "rotary",
    "rotary_backward": "rotary",
    "swiglu": "swiglu",
    "swiglu_backward": "swiglu",
    "flash_attention_forward": "flash_attention",
    "flash_attention_backward": "flash_attention",
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_weight_gradient": "grouped_gemm",
    "moe_permute": "moe_permute",
    "moe_unpermute": "moe_unpermute",
    "moe_unpermute_backward": "moe_unpermute",
}


class Dispatcher:
    """The implementations in the order of a choice."""

    def __init__(self, choice: Choice, tables: Mapping[str, Mapping[str, Implementation]]) -> None:
        self.choice = choice
        self._tables = tables
        self._library = torch.library.Library("mindspeed", "IMPL")  # registrations end with this object

    def register(self) -> None:
        for op in OPERATOR_OF:
            self._library.impl(op, functools.partial(self.run, op), "PrivateUse1", allow_override=True)

    def find(self, op: str, *arguments: Any) -> tuple[str, Implementation] | None:
        """The name and the implementation that computes this call, None if only the reference does."""
        for name in self.choice.order(OPERATOR_OF.get(op, op)):
            implementation = self._tables[name].get(op)
            if implementation is not None and implementation.takes(*arguments):
                return name, implementation
        return None

    def run(self, op: str, *arguments: Any) -> Any:
        """``torch.ops.mindspeed.<op>`` on an NPU."""
        found = self.find(op, *arguments)
        if found is not None:
            return found[1].run(*arguments)
        last = vendor.REFERENCE.get(op)
        if last is not None:
            return last(*arguments)
        raise NotImplementedError(
            f"mindspeed::{op} on an NPU: neither torch_npu nor an AscendC kernel takes these arguments, or {VARIABLE} "
            f"excludes them; call mindspeed_kernels.{OPERATOR_OF[op]}, which falls back to the definition"
        )


@functools.cache
def dispatcher() -> Dispatcher:
    """The one of this process, registered with PyTorch when the first tensor on an NPU meets an operator.

    Raises:
        ValueError: MINDSPEED_NPU_IMPL makes no sense.
        ImportError: it asks for AscendC kernels that are not there.
    """
    choice = read_choice(os.environ.get(VARIABLE, ""))
    if "ascendc" in (choice.default, *choice.exceptions.values()):
        ascendc.require()
    found = Dispatcher(choice, dict(zip(IMPLEMENTATIONS, (vendor.TABLE, ascendc.table()), strict=False)))
    found.register()
    return found


def on_npu(tensor: Tensor) -> bool:
    return tensor.device.type == "npu"


def takes(op: str, *arguments: Any) -> bool:
    """Whether ``torch.ops.mindspeed.<op>`` computes this call on an NPU. The first argument is a tensor."""
    return on_npu(arguments[0]) and dispatcher().find(op, *arguments) is not None


def run(op: str, *arguments: Any) -> Any:
    """What :func:`takes` says can be computed."""
    return dispatcher().run(op, *arguments)
