"""What is measured: one piece of work, and those who do it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Outputs = Tensor | tuple[Tensor, ...]

OURS = "mindspeed"
EAGER = "HF eager"
COMPILED = "HF compiled"


@dataclass(frozen=True)
class Work:
    """The least an implementation has to do in one pass."""

    bytes: int = 0
    """Read and written, every input and output once."""
    flops: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Problem:
    """Inputs in memory and the contestants, all called with the same `arguments`."""

    arguments: tuple[Tensor, ...]
    leaves: Sequence[Tensor]
    """What gradients are taken of: arguments and parameters, requiring grad."""
    contestants: Mapping[str, Callable[..., Outputs]]
    """By name; OURS is among them, and the first is the one the others' results are held against."""
    layers: int = 1
    """How many operators in sequence round their results: as many times is what the results may differ by."""


@dataclass(frozen=True)
class Case:
    op: str
    shape: str
    dtype: torch.dtype
    forward: Work
    backward: Work | None
    """None if there is none to measure."""
    build: Callable[[], Problem]

    def work(self, backward: bool) -> Work:
        return self.forward + self.backward if backward and self.backward else self.forward

    @property
    def passes(self) -> tuple[bool, ...]:
        """Whether with backward: of every pass to measure."""
        return (False, True) if self.backward else (False,)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype_name}"
