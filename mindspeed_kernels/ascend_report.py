"""``python -m mindspeed_kernels.ascend_report``: what the AscendC kernels cost, counted on their CPU twin.

One core's share of a step of a model the size of Llama 3 8B is run on the twin, which counts bytes, repeats of vector
instructions and floating-point operations of the cube. From these and a few figures of the chip follows a lower bound
of the time: the longest of what each resource needs if it never waits for another. No NPU has been measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_kernels.ascend_twin import LIBRARY, AscendTwin


@dataclass(frozen=True)
class Chip:
    """An Ascend 910B. Bandwidths and cores are those of the examples in the public AscendC guide; a vector core takes a
    repeat of 256 bytes per cycle and a cube core 16 x 16 x 16 products of 16 bits, or a quarter of them in float32; the
    clock is an assumption.
    """

    cores: int = 20  # each with one cube core and two vector cores
    gm_bytes_per_second: float = 1.6e12
    l2_bytes_per_second: float = 7e12
    clock: float = 1.8e9

    @property
    def vector_cores(self) -> int:
        return 2 * self.cores

    def cube_flops_per_second(self, dtype: torch.dtype) -> float:
        return self.cores * self.clock * 2 * 16**3 * (2 / dtype.itemsize) ** 2


@dataclass(frozen=True)
class Cost:
    """A kernel's cost for all tokens, from the counters of one share of ``shares`` equal ones."""

    kernel: str
    counters: dict[str, int]
    shares: float
    least_bytes: float  # every operand once
    chip: Chip
    shares_at_once: int  # cores that work on a share each
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> float:
        """To and from global memory or the cache in front of it."""
        return (self.counters["gm_read"] + self.counters["gm_written"]) * self.shares

    @property
    def seconds(self) -> dict[str, float]:
        """What each resource needs. What is moved again is taken to be in the cache still."""
        rounds = self.shares / self.shares_at_once
        return {
            "memory": max(self.least_bytes / self.chip.gm_bytes_per_second, self.bytes / self.chip.l2_bytes_per_second),
            "vector": self.counters["vector_critical"] * rounds / self.chip.clock,
            "cube": self.counters["cube_flops_padded"] * self.shares / self.chip.cube_flops_per_second(self.dtype),
        }

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def local_memory(self) -> str:
        """How much of the memories of a core is used."""
        names = ("UB", "L1", "L0A", "L0B", "L0C")
        return " ".join(
            f"{name} {self.counters[f'peak_{name}'] >> 10}" for name in names if self.counters[f"peak_{name}"]
        )


HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD_DIM, TOP_K = 4096, 14336, 32, 8, 128, 2


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _vector_kernels(rows: int) -> Iterator[tuple[str, int, Callable[[AscendTwin], object]]]:
    """Name, least bytes and call of one core's share."""
    x, residual = torch.randn(2, rows, HIDDEN).bfloat16()
    weight, rstd = torch.randn(HIDDEN), torch.ones(rows)
    yield (
        "rms_norm forward",
        2 * _bytes(x) + _bytes(rstd),
        lambda t: t.rms_norm(x, weight, eps=1e-6, round_before_weight=True),
    )
    yield (
        "add_rms_norm forward",
        4 * _bytes(x) + _bytes(rstd),
        lambda t: t.rms_norm(x, weight, eps=1e-6, residual=residual, round_before_weight=True),
    )
    yield (
        "rms_norm backward",
        3 * _bytes(x) + _bytes(rstd),
        lambda t: t.rms_norm_backward(x, residual, weight, rstd, round_before_weight=True),
    )
    gate, up = torch.randn(2, rows, INTERMEDIATE).bfloat16()
    yield "swiglu forward", 3 * _bytes(gate), lambda t: t.swiglu(gate, up)
    yield "swiglu backward", 5 * _bytes(gate), lambda t: t.swiglu_backward(up, gate, up)
    q, k = (torch.randn(1, rows, heads, HEAD_DIM).bfloat16().transpose(1, 2) for heads in (HEADS, KEY_VALUE_HEADS))
    cos = torch.randn(1, rows, HEAD_DIM).bfloat16()
    least = 2 * _bytes(q, k) + 2 * _bytes(cos)
    yield "rotary", least, lambda t: t.rotary(q, k, cos, cos)
    yield "rotary interleaved", least - _bytes(cos), lambda t: t.rotary(q, k, cos, cos, interleaved=True)
    source, weights = torch.randperm(rows * TOP_K), torch.rand(rows, TOP_K)
    position, y = source.argsort().view(rows, TOP_K), torch.randn(rows * TOP_K, HIDDEN).bfloat16()
    yield "moe_permute", _bytes(x, y, source), lambda t: t.moe_permute(x, source, TOP_K)
    yield "moe_unpermute", _bytes(x, y, position, weights), lambda t: t.moe_unpermute(y, position, weights)
    yield (
        "moe_unpermute backward",
        _bytes(x, y, y, source, weights, weights),
        lambda t: t.moe_unpermute_backward(x, y, source, weights),
    )


def vector_costs(library: Path, chip: Chip, tokens: int) -> Iterator[Cost]:
    """The kernels of vector cores, which divide tokens among them."""
    cores = chip.vector_cores
    for kernel, least, call in _vector_kernels(math.ceil(tokens / cores)):
        twin = AscendTwin(library, blocks=1)
        call(twin)
        yield Cost(kernel, twin.report.counters, cores, least * cores, chip, cores)


def cube_costs(
    library: Path, chip: Chip, tokens: int, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Cost]:
    """The kernels with products: causal attention of one sequence, of which a block of queries in the middle stands for
    all, and one tile of the products of experts with as many tokens as a tile has rows.
    """

    def cost(kernel: str, shares: int, elements: int) -> Cost:
        name = kernel if dtype == torch.bfloat16 else f"{kernel}, {str(dtype).removeprefix('torch.')}"
        return Cost(name, twin.report.counters, shares, dtype.itemsize * elements, chip, chip.cores, dtype)

    tile = 128
    middle = tokens // 2
    q, out = torch.randn(2, tile, 1, head_dim).to(dtype)
    k, v = torch.randn(2, middle + tile // 2, 1, head_dim).to(dtype)
    twin = AscendTwin(library, blocks=1)
    tasks = math.ceil(tokens / tile) * HEADS
    elements = tokens * head_dim * (2 * HEADS + 2 * KEY_VALUE_HEADS)
    _, logsumexp = twin.flash_attention(q, k, v)
    yield cost("flash_attention forward", tasks, elements)
    twin.flash_attention_backward(out, None, q, k, v, out, logsumexp)
    yield cost("flash_attention backward", tasks, 2 * elements)

    x, weight = torch.randn(tile, HIDDEN).to(dtype), torch.randn(1, tile, HIDDEN).to(dtype)
    twin.grouped_gemm(x, weight, torch.tensor([tile], dtype=torch.int32))
    across, elements = math.ceil(INTERMEDIATE / tile), tokens * (HIDDEN + INTERMEDIATE) + HIDDEN * INTERMEDIATE
    yield cost("grouped_gemm", math.ceil(tokens / tile) * across, elements)
    x, grad_y = torch.randn(2, tokens, tile).to(dtype)
    twin.grouped_gemm_weight_gradient(grad_y, x, torch.tensor([tokens], dtype=torch.int32))
    yield cost("grouped_gemm weight gradient", math.ceil(HIDDEN / tile) * across, elements)


def table(costs: Iterable[Cost]) -> str:
    """The costs as text."""
    lines = [f"{'kernel':38}{'MB moved':>9}{'of least':>9}{'memory us':>11}{'vector us':>11}{'cube us':>9}  "]
    lines[0] += "bound   KiB of a core's memory"
    for cost in costs:
        memory, vector, cube = (seconds * 1e6 for seconds in cost.seconds.values())
        lines.append(
            f"{cost.kernel:38}{cost.bytes / 1e6:9.1f}{cost.bytes / cost.least_bytes:9.3f}"
            f"{memory:11.1f}{vector:11.1f}{cube:9.1f}  {cost.bound:6}  {cost.local_memory}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_kernels.ascend_report", description=__doc__)
    parser.add_argument("--library", type=Path, default=LIBRARY, help="the twin's library")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cores", type=int, default=Chip.cores, help="AI cores of the chip")
    parser.add_argument("--clock-ghz", type=float, default=Chip.clock / 1e9)
    arguments = parser.parse_args()
    chip = Chip(cores=arguments.cores, clock=arguments.clock_ghz * 1e9)
    print(
        f"A model from counts on the CPU twin, not a measurement: {arguments.tokens} tokens, bfloat16 where nothing "
        f"else is said, {chip.cores} cores, {chip.clock / 1e9:g} GHz, {chip.gm_bytes_per_second / 1e12:g} TB/s, from "
        f"the cache {chip.l2_bytes_per_second / 1e12:g} TB/s"
    )
    call = arguments.library, chip, arguments.tokens
    print(table([*vector_costs(*call), *cube_costs(*call), *cube_costs(*call, dtype=torch.float32)]))


if __name__ == "__main__":
    main()
