"""Lets PyTorch's own operators run on the stand-in device: it has no kernels, but its memory is the host's.

torch_npu's kernels of ``aten`` would launch what is not there. Each is replaced by the CPU's, on tensors over the same
memory; allocation, views, streams and our operators stay torch_npu's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

KEY = "PrivateUse1"
# Allocation and views, which torch_npu does on the host.
KEPT = (
    *("empty.memory_format", "empty_strided", "new_empty_strided", "empty_like", "_pin_memory", "is_pinned"),
    *("as_strided", "as_strided_", "view", "_reshape_alias", "squeeze", "squeeze.dim", "unsqueeze", "view_as_real"),
    *("resize_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
    *("record_stream", "is_set_to", "view_as_complex"),
)


def on_host(tensor: Tensor) -> Tensor:
    """The same elements as a tensor of the CPU; what the device's queue holds is waited for."""
    torch.npu.current_stream().synchronize()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype, count=extent).as_strided(tensor.shape, tensor.stride(), 0)


def on_npu(tensor: Tensor) -> Tensor:
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    on_host(moved).copy_(tensor)
    return moved


def through_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which computes on the CPU, for tensors and devices of the NPU. What it writes to, it writes to."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        originals: dict[int, Tensor] = {}

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == "npu" else value
            if not isinstance(value, Tensor) or value.device.type != "npu":
                return value
            alias = on_host(value)
            originals[id(alias)] = value
            return alias

        def back(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return originals[id(value)] if id(value) in originals else on_npu(value)

        arguments = pytree.tree_map(to_host, (args, kwargs))  # kept, so that no address is taken twice
        return pytree.tree_map(back, function(*arguments[0], **arguments[1]))

    return run


def _copied(self: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
            non_blocking: bool = False, memory_format: Any = None) -> Tensor:  # fmt: skip
    source = on_host(self) if self.device.type == "npu" else self
    target = torch.device(self.device if device is None else device)
    if target.type == "meta":
        return torch.empty_like(source, dtype=dtype, device="meta")
    moved = source.detach().clone(memory_format=memory_format or torch.preserve_format).to(dtype or self.dtype)
    return on_npu(moved) if target.type == "npu" else moved


def _matmul_gradients(grad: Tensor, left: Tensor, right: Tensor, wanted: list[bool]) -> list[Tensor]:
    """``aten::matmul_backward``, which the CPU does not have."""
    return [(grad @ right.mT).sum_to_size(left.shape), (left.mT @ grad).sum_to_size(right.shape)]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


# What torch_npu's kernels and gradients of ``aten`` are made of.
_OF_ATEN = {"matmul_backward": _matmul_gradients}
_OF_NPU = {"_npu_dtype_cast": _cast, "_npu_dtype_cast_backward": _cast}


def install() -> list[torch.library.Library]:
    """Replace the kernels as long as the returned objects live."""
    aten, npu = (torch.library.Library(namespace, "IMPL") for namespace in ("aten", "npu"))
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
        namespace, _, qualified = name.partition("::")
        if namespace != "aten" or qualified in KEPT:
            continue
        packet, _, overload = qualified.partition(".")
        of_cpu = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        function = _OF_ATEN.get(packet) or of_cpu
        if function is not None:
            kernel = _copied if packet == "_to_copy" else through_host(function)
            aten.impl(qualified, kernel, KEY, allow_override=True)
    for name, function in _OF_NPU.items():
        npu.impl(name, through_host(function), KEY, allow_override=True)
    return [aten, npu]
