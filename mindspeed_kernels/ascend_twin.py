"""Runs the AscendC kernels of ``csrc/ascend/kernels`` on their CPU twin and reports what they did.

For tests and for ``python -m mindspeed_kernels.ascend_report``: the twin checks, it does not compute fast. The library
is not part of the installed package; in a checkout ::

    cmake -S csrc/ascend -B build/ascend && cmake --build build/ascend

writes it next to this file. Tensors are contiguous CPU tensors of float32, bfloat16 or float16.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.ascend_twin_attention import (
    FORWARD,
    KEY_GRADIENT,
    QUERY_GRADIENT,
    AttentionTiling,
    attention_tiling,
    key_blocks,
    query_blocks,
)

LIBRARY = Path(__file__).with_name("_ascend_twin.so")
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/ascend/launch/twin.h


@dataclass(frozen=True)
class Report:
    """What one launch did.

    Attributes:
        errors: what the hardware would hang on, trap on or silently get wrong, in words.
        sync_sites: the places ("file.h:12") where the kernel waited.
        queues: of each queue, by the place of its InitBuffer: its ``buffers``, how many were ``filled`` by all cores,
            and how many of these ``overlapped``: nothing had the copy or computation that filled one wait for what
            emptied the one before it.
        counters: bytes, operations and memory; csrc/ascend/twin/core.h names them.
    """

    errors: list[str]
    sync_sites: list[str]
    queues: dict[str, dict[str, int]]
    counters: dict[str, int]

    def __add__(self, other: Report) -> Report:
        """Of one launch after another: what they used of a core is the larger of both."""
        counters = {
            name: max(count, other.counters[name]) if name.startswith("peak") else count + other.counters[name]
            for name, count in self.counters.items()
        }
        queues = {site: dict(use) for site, use in self.queues.items()}
        for site, use in other.queues.items():
            both = queues.setdefault(site, {"buffers": use["buffers"], "filled": 0, "overlapped": 0})
            both["filled"] += use["filled"]
            both["overlapped"] += use["overlapped"]
        return Report(self.errors + other.errors, sorted({*self.sync_sites, *other.sync_sites}), queues, counters)


class _Run(ctypes.Structure):
    _fields_ = (("blocks", ctypes.c_int), ("dropped_sync", ctypes.c_char_p), ("max_buffers", ctypes.c_int))


class _Strides(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "head", "seq"))


class _RotaryHeads(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("in", _Strides), ("out", _Strides))


class _TwinHeads(ctypes.Structure):
    _fields_ = (
        ("in", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("in_bytes", ctypes.c_int64),
        ("out_bytes", ctypes.c_int64),
        ("heads", _RotaryHeads),
    )


class _RotaryTiling(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "seq", "head_dim", "rotary_dim", "angle_batch_stride")),
        ("interleaved", ctypes.c_bool),
        ("transposed", ctypes.c_bool),
        ("q", _RotaryHeads),
        ("k", _RotaryHeads),
        ("heads", ctypes.c_int32),
    )


class AscendTwin:
    """The kernels, each run on ``blocks`` blocks: vector cores, or cube cores with two vector cores each.

    Args:
        library: where the build put the library.
        blocks: how many blocks to launch.
        dropped_sync: a place of ``Report.sync_sites`` that is to have no effect, as if it had been left out.
        max_buffers: the most that a queue gets, whatever it asks for; 0 for no limit.

    ``report`` is that of the last call. A call raises RuntimeError with the errors unless ``tolerant``.
    """

    def __init__(
        self,
        library: Path = LIBRARY,
        *,
        blocks: int = 2,
        dropped_sync: str = "",
        max_buffers: int = 0,
        tolerant: bool = False,
    ) -> None:
        if not library.exists():
            raise FileNotFoundError(
                f"{library} is not there; build it: cmake -S csrc/ascend -B build/ascend && cmake --build build/ascend"
            )
        self._library = ctypes.CDLL(str(library))
        self._run = _Run(blocks, dropped_sync.encode(), max_buffers)
        self._tolerant = tolerant
        self.blocks = blocks
        self.report = Report([], [], {}, {})

    def _call(self, name: str, *arguments: Any) -> Report:
        function = getattr(self._library, name)
        function.restype = ctypes.c_void_p
        address = function(self._run, *(_c(a) for a in arguments))
        try:
            self.report = Report(**json.loads(ctypes.string_at(address)))
        finally:
            ctypes.CDLL(None).free(ctypes.c_void_p(address))
        if self.report.errors and not self._tolerant:
            raise RuntimeError("\n".join(self.report.errors))
        return self.report

    def swiglu(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """``[rows, length]`` each, or ``[rows, 2 * length]`` in one."""
        rows, length = gate.shape[0], gate.shape[1] // (1 if up is not None else 2)
        y = gate.new_empty(rows, length)
        second = gate[:, length:] if up is None else up
        self._call("twin_swiglu_forward", _TYPES[gate.dtype], gate, second, y, rows, length, up is None)
        return y

    def swiglu_backward(self, grad_y: Tensor, gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, ...]:
        rows, length = grad_y.shape
        grads = [torch.empty_like(t) for t in (gate, up) if t is not None]
        second, grad_second = (gate[:, length:], grads[0][:, length:]) if up is None else (up, grads[1])
        tensors = (grad_y, gate, second, grads[0], grad_second)
        self._call("twin_swiglu_backward", _TYPES[gate.dtype], *tensors, rows, length, up is None)
        return tuple(grads)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        *,
        eps: float,
        round_before_weight: bool,
        residual: Tensor | None = None,
        y_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """``y``, ``x + residual`` and ``rstd`` of ``x [rows, hidden]``; ``weight`` is float32."""
        rows, hidden = x.shape
        y = x.new_empty(rows, hidden, dtype=y_dtype or x.dtype)
        total = None if residual is None else torch.empty_like(x)
        rstd = x.new_empty(rows, dtype=torch.float32)
        types = _TYPES[x.dtype], _TYPES[y.dtype]
        tensors = (x, residual, weight, y, total, rstd)
        self._call("twin_rms_norm_forward", *types, *tensors, rows, hidden, eps, round_before_weight)
        return y, total, rstd

    def rms_norm_backward(
        self,
        grad_y: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        *,
        round_before_weight: bool,
        grad_sum: Tensor | None = None,
        weight_gradient: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of ``x`` and of the float32 weight."""
        rows, hidden = x.shape
        grad_x = torch.empty_like(x)
        grad_weight = x.new_empty(hidden, dtype=torch.float32) if weight_gradient else None
        workspace = x.new_empty(self.blocks, hidden, dtype=torch.float32)
        types = _TYPES[x.dtype], _TYPES[grad_y.dtype]
        tensors = (grad_y, grad_sum, x, weight, rstd, grad_x, grad_weight, workspace)
        self._call("twin_rms_norm_backward", *types, *tensors, rows, hidden, round_before_weight)
        return grad_x, grad_weight

    def rotary(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        interleaved: bool = False,
        transposed: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``q`` and ``k`` ``[batch, heads, seq, head_dim]``, the last dimension dense; transposed, the gradient."""
        dtype = out_dtype or q.dtype
        outputs = [torch.empty_like(x, dtype=dtype) for x in (q, k)]
        heads = [_twin_heads(x, y) for x, y in zip((q, k), outputs, strict=True)]
        angle_stride = 0 if cos.shape[0] == 1 else cos.stride(0)
        tiling = _RotaryTiling(q.shape[0], q.shape[2], q.shape[3], cos.shape[2], angle_stride, interleaved, transposed)
        types = _TYPES[q.dtype], _TYPES[cos.dtype], _TYPES[dtype]
        self._call("twin_rotary", *types, *map(ctypes.byref, heads), cos, sin, ctypes.byref(tiling))
        return outputs[0], outputs[1]

    def moe_permute(self, x: Tensor, source: Tensor, top_k: int) -> Tensor:
        """``x [tokens, hidden]`` in the rows of ``source``, int64 ``[tokens * top_k]``, -1 for zeros."""
        y = x.new_empty(len(source), x.shape[1])
        self._call("twin_moe_permute", _TYPES[x.dtype], x, source, y, x.shape[0], top_k, x.shape[1])
        return y

    def moe_unpermute(self, y_sorted: Tensor, position: Tensor, weights: Tensor | None = None) -> Tensor:
        """The (weighted) sum of each token's rows at ``position``, int64 ``[tokens, top_k]``, -1 for none."""
        (tokens, top_k), hidden = position.shape, y_sorted.shape[1]
        out = y_sorted.new_empty(tokens, hidden)
        tensors = (y_sorted, position, weights, out)
        self._call("twin_moe_unpermute", _TYPES[out.dtype], *tensors, tokens, top_k, hidden)
        return out

    def moe_unpermute_backward(
        self, grad_out: Tensor, y_sorted: Tensor, source: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of ``y_sorted`` and of the float32 weights ``[tokens, top_k]``."""
        (tokens, top_k), hidden = weights.shape, y_sorted.shape[1]
        grad_y, grad_weights = torch.empty_like(y_sorted), torch.zeros_like(weights)
        tensors = (grad_out, y_sorted, source, weights, grad_y, grad_weights)
        self._call("twin_moe_unpermute_backward", _TYPES[grad_out.dtype], *tensors, tokens, top_k, hidden)
        return grad_y, grad_weights

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
        """As :func:`mindspeed_kernels.grouped_gemm`, with int32 offsets."""
        groups, (k, n) = weight.shape[0], weight.shape[1:] if transposed else weight.shape[:0:-1]
        rows = int(offsets[-1])
        y = x.new_zeros(x.shape[0], n)
        self._call("twin_grouped_gemm", _TYPES[x.dtype], x, weight, offsets, y, rows, groups, k, n, transposed)
        return y

    def grouped_gemm_weight_gradient(
        self, grad_y: Tensor, x: Tensor, offsets: Tensor, *, transposed: bool = False
    ) -> Tensor:
        """The gradient of the weight of :meth:`grouped_gemm`."""
        groups, k, n = len(offsets), x.shape[1], grad_y.shape[1]
        grad = x.new_zeros(groups, *((k, n) if transposed else (n, k)))
        tensors = (grad_y, x, offsets, grad)
        arguments = (int(offsets[-1]), groups, k, n, transposed)
        self._call("twin_grouped_gemm_weight_gradient", _TYPES[x.dtype], *tensors, *arguments)
        return grad

    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        query_offsets: Tensor | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The output and the logsumexp, as :func:`mindspeed_kernels.flash_attention`, of packed sequences.

        ``sinks`` are float32. ``options``: causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k.
        """
        tiling, ends_q, ends_k = attention_tiling(q, k, v, **options)
        per_block, workspace = self._attention_sizes(FORWARD, q.dtype, tiling)
        blocks = query_blocks(ends_q, ends_k, query_offsets, per_block)
        tiling.blocks = len(blocks)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        logsumexp = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        tensors = (q, k, v, blocks, sinks, out, logsumexp, workspace)
        self._call("twin_flash_attention_forward", _TYPES[q.dtype], *tensors, k.shape[0], ctypes.byref(tiling))
        return out, logsumexp

    def flash_attention_backward(
        self,
        grad_out: Tensor,
        grad_logsumexp: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        *,
        query_offsets: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, of two kernels; ``report`` is that of both."""
        tiling, ends_q, ends_k = attention_tiling(q, k, v, **options)
        blind = logsumexp == -torch.inf
        delta = (grad_out.float() * out.float()).sum(-1).T.contiguous()  # [num_heads, queries]
        if grad_logsumexp is not None:
            delta -= grad_logsumexp.masked_fill(blind, 0.0)
        denominator = logsumexp.masked_fill(blind, torch.inf)
        grads = [torch.empty_like(t) for t in (q, k, v)]
        reports = []
        for kernel, table, outputs in (
            (QUERY_GRADIENT, query_blocks, (grads[0], None, None)),
            (KEY_GRADIENT, key_blocks, (None, grads[1], grads[2])),
        ):
            per_block, workspace = self._attention_sizes(kernel, q.dtype, tiling)
            blocks = table(ends_q, ends_k, query_offsets, per_block)
            tiling.blocks = len(blocks)
            tensors = (q, k, v, grad_out, denominator, delta, blocks, *outputs, workspace)
            reference = ctypes.byref(tiling)
            reports.append(
                self._call("twin_flash_attention_backward", _TYPES[q.dtype], *tensors, k.shape[0], reference)
            )
        self.report = reports[0] + reports[1]
        return grads[0], grads[1], grads[2]

    def _attention_sizes(self, kernel: int, dtype: torch.dtype, tiling: AttentionTiling) -> tuple[int, Tensor]:
        """Rows of a block, which ``tiling`` is told too, and workspaces for all blocks of cores."""

        def size(name: str) -> int:
            function = getattr(self._library, name)
            function.restype = ctypes.c_int64
            return function(_TYPES[dtype], kernel, ctypes.byref(tiling))

        per_block = max(1, size("twin_attention_rows"))  # 0: the launcher will refuse
        workspace = torch.empty(self.blocks * size("twin_attention_workspace"), dtype=torch.uint8)
        return per_block, workspace


def _twin_heads(x: Tensor, y: Tensor) -> _TwinHeads:
    def strides(t: Tensor) -> _Strides:
        return _Strides(t.stride(0), t.stride(1), t.stride(2))

    def extent(t: Tensor) -> int:
        """Bytes from the first to the last element."""
        return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()

    heads = _RotaryHeads(x.shape[1], strides(x), strides(y))
    return _TwinHeads(x.data_ptr(), y.data_ptr(), extent(x), extent(y), heads)


def _c(argument: Any) -> Any:
    """An argument of a C function: int64 unless it says otherwise. The element types are the only plain ints."""
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    if isinstance(argument, bool):
        return ctypes.c_bool(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument
