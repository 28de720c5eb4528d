"""SwiGLU sites: a module of three linear layers, `down(silu(gate(x)) * up(x))`, or of two, with gate and up in one."""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mindspeed_kernels
from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.sites import fingerprint, takes_one_tensor

name = "swiglu"


@dataclass(frozen=True)
class FusedSwiGLU:
    """`mindspeed_kernels.swiglu` between the linear layers of one module, given by their names.

    Without `up`, `gate` is the layer whose output is gate and up, one after the other. The layers are called as
    modules, so that their hooks run and a quantised or adapted layer stays what it is.
    """

    gate: str
    up: str | None
    down: str

    def build(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: nn.Module, x: Tensor) -> Tensor:
            gate = getattr(module, self.gate)(x)
            up = getattr(module, self.up)(x) if self.up else None
            return getattr(module, self.down)(mindspeed_kernels.swiglu(gate, up))

        return forward

    def __str__(self) -> str:
        product = f"silu({self.gate}) * {self.up}" if self.up else f"silu * up of {self.gate}"
        return f"{self.down}({product})"


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if this is no gated MLP by its looks."""
    if not _roles(module) or any(True for _ in module.parameters(recurse=False)) or not takes_one_tensor(module):
        return None
    return fingerprint(module)


def proof(module: nn.Module, device: torch.device) -> Proof:
    for child in _others(module):
        x = prove.random((256,), torch.float32, device, seed=0)
        if not torch.allclose(child(x.clone()), F.silu(x)):  # it may work in place
            return Proof.not_applicable(f"the activation {type(child).__name__} is not SiLU")
    return prove.nearest(Proof.run(fusion, partial(_compare, module, fusion, device)) for fusion in _roles(module))


def _linears(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The sizes of the linear layers, known by what they have (nn.Linear, quantised and adapted ones), not are."""
    return {
        name: (int(child.in_features), int(child.out_features))  # type: ignore[arg-type]
        for name, child in module.named_children()
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    }


def _others(module: nn.Module) -> list[nn.Module]:
    linears = _linears(module)
    return [child for name, child in module.named_children() if name not in linears]


def _roles(module: nn.Module) -> list[FusedSwiGLU]:
    """The roles that the sizes of the linear layers allow. Which of two is the gate, only the proof can tell."""
    others = _others(module)
    if len(others) > 1 or any(next(m.parameters(), None) is not None or any(m.children()) for m in others):
        return []
    size = _linears(module)
    if len(size) == 2:
        return [
            FusedSwiGLU(gate, None, down)
            for gate, down in itertools.permutations(size)
            if size[gate][0] == size[down][1] and size[gate][1] == 2 * size[down][0]
        ]
    if len(size) == 3:
        return [
            FusedSwiGLU(gate, up, down)
            for gate, up, down in itertools.permutations(size)
            if size[gate] == size[up] and size[gate] == size[down][::-1]
        ]
    return []


def _compare(module: nn.Module, fusion: FusedSwiGLU, device: torch.device, dtype: torch.dtype) -> prove.Deviation:
    hidden_size, intermediate_size = 24, 40
    packed = intermediate_size if fusion.up else 2 * intermediate_size
    twin = prove.shallow_copy(module)
    for seed, (layer, n_in, n_out) in enumerate(
        [
            (fusion.gate, hidden_size, packed),
            (fusion.up, hidden_size, packed),
            (fusion.down, intermediate_size, hidden_size),
        ]
    ):
        if layer:
            bias = getattr(getattr(module, layer), "bias", None) is not None
            setattr(twin, layer, _random_linear(n_in, n_out, bias, dtype, device, seed=10 * seed))
    # Rows up to sizes at which a clamp or a soft cap on gate, up or their product would show.
    x = prove.random_rows((2, 12, hidden_size), dtype, device, decades=(-2, 3), seed=0)
    original = type(module).forward
    fused = fusion.build(original)
    return prove.deviation(partial(original, twin, x), partial(fused, twin, x), [x, *twin.parameters()])


def _random_linear(
    n_in: int, n_out: int, bias: bool, dtype: torch.dtype, device: torch.device, *, seed: int
) -> nn.Linear:
    linear = nn.Linear(n_in, n_out, bias=bias, device="meta")
    linear.weight = nn.Parameter(prove.random((n_out, n_in), dtype, device, seed=seed) * n_in**-0.5)
    if bias:
        linear.bias = nn.Parameter(prove.random((n_out,), dtype, device, seed=seed + 1))
    return linear
