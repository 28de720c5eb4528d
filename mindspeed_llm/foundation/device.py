"""The device that this process computes on: the only place that knows backends by name."""

from __future__ import annotations

import os
import resource
import sys
import time
from types import ModuleType

import torch

from mindspeed_kernels.npu.dispatch import dispatcher
from mindspeed_llm.errors import UserError

# Dense bf16 matrix peak in FLOP/s by a part of the device's name, from the vendors' public data sheets. A device that
# is not listed reports no MFU rather than a wrong one; a CPU's peak is measured.
_PEAK_FLOPS = {"910B": 354e12, "910_93": 376e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def select_device(local_rank: int) -> torch.device:
    """The best device of this machine for ``local_rank``; ``MINDSPEED_DEVICE=cpu|cuda|npu`` overrides the choice."""
    wanted = os.environ.get("MINDSPEED_DEVICE")
    if wanted not in (None, *_COLLECTIVES):
        raise UserError(f"MINDSPEED_DEVICE={wanted}: expected one of {', '.join(_COLLECTIVES)}")
    for kind in (wanted,) if wanted else ("npu", "cuda", "cpu"):
        module = _device_module(kind)
        if kind == "cpu" or (module is not None and module.is_available()):
            if module is not None:
                module.set_device(local_rank)
            if kind == "npu":
                _prepare_npu()
            return torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    raise UserError(f"MINDSPEED_DEVICE={wanted}, but this machine has no usable {wanted} device")


def _prepare_npu() -> None:
    """Keep tensors in PyTorch's memory layout, in which shards are cut, instead of one that CANN's products prefer; and
    read MINDSPEED_NPU_IMPL now, not when the first operator meets a tensor."""
    torch.get_device_module("npu").config.allow_internal_format = False
    try:
        dispatcher()
    except (ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def collective_backend(device: torch.device) -> str:
    """torch.distributed's backend: gloo for host tensors next to the device's own library."""
    own = _COLLECTIVES[device.type]
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def has_fused_attention(device: torch.device) -> bool:
    """Whether ``mindspeed_kernels`` attends by kernels there: its own on a CPU, torch_npu's or its own on an NPU."""
    return device.type in ("cpu", "npu")


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host on ``device``, copied while the host goes on: out of page-locked memory, as that needs."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued, so that a clock read afterwards means something."""
    module = _device_module(device.type)
    if module is not None:
        module.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory use so far in GiB: allocated on the device, resident on the host for a CPU."""
    module = _device_module(device.type)
    if module is not None:
        return module.max_memory_allocated(device) / 2**30
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return resident / 2**30 if sys.platform == "darwin" else resident / 2**20


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak matrix FLOP/s that model FLOPs utilisation refers to, or None where it isn't known."""
    module = _device_module(device.type)
    if module is None:
        return _measured_matmul_flops(dtype)
    name = module.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def device_random_state() -> torch.Tensor | None:
    """State of the current accelerator's random generator, None without an accelerator."""
    module = _accelerator()
    return None if module is None else module.get_rng_state()


def set_device_random_state(state: torch.Tensor) -> None:
    """Put the current accelerator's random generator into ``state``; nothing to do without an accelerator."""
    module = _accelerator()
    if module is not None:
        module.set_rng_state(state)


def _accelerator() -> ModuleType | None:
    modules = (_device_module(kind) for kind in ("npu", "cuda"))
    return next((module for module in modules if module is not None and module.is_initialized()), None)


def _device_module(kind: str) -> ModuleType | None:
    """``torch.cuda`` or ``torch.npu``; None for a CPU or where the backend isn't installed."""
    if kind == "cpu":
        return None
    if kind == "npu":
        try:
            import torch_npu  # noqa: F401  # its import registers torch.npu
        except ImportError:
            return None
    return getattr(torch, kind)


def _measured_matmul_flops(dtype: torch.dtype) -> float:
    """The best that torch.mm reaches on this CPU with the threads that this process has."""
    generator = torch.Generator().manual_seed(0)
    best = 0.0
    for size in (256, 512, 1024):  # which one fits the caches best differs from CPU to CPU
        a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
        for _ in range(10):
            start = time.perf_counter()
            a @ b
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
