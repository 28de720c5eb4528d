"""Experts of a mixture: a module with stacked `gate_up_proj` and `down_proj`, of transformers' experts interface."""

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mindspeed_kernels
from mindspeed_kernels.hf import prove
from mindspeed_kernels.hf.prove import Proof
from mindspeed_kernels.hf.sites import fingerprint
from mindspeed_kernels.npu import experts as npu
from mindspeed_kernels.ops._common import has_kernel

name = "experts"

_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class FusedExperts:
    """`mindspeed_kernels.fused_experts` with a module's own weights, and the options that make it the same."""

    transposed: bool
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def build(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if not self.has_kernel(module, hidden_states):
                return original(module, hidden_states, top_k_index, top_k_weights)
            return self(module, hidden_states, top_k_index, top_k_weights)

        return forward

    @staticmethod
    def has_kernel(module: nn.Module, x: Tensor) -> bool:
        """Elsewhere transformers' implementations, which group products too, are faster than our definition."""
        gate_up = _weight(module, "gate_up_proj")
        return has_kernel(x, gate_up) or npu.takes(x, gate_up)

    def __call__(self, module: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        gate_up, down = (_weight(module, name) for name in _WEIGHTS)
        gate_up_bias, down_bias = (getattr(module, name, None) for name in _BIASES)
        dtype = torch.get_autocast_dtype(device) if autocast else gate_up.dtype
        y = mindspeed_kernels.fused_experts(
            x.to(dtype),
            top_k_index,
            top_k_weights,
            gate_up.to(dtype),
            down.to(dtype),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            transposed=self.transposed,
            interleaved=self.interleaved,
            alpha=self.alpha,
            limit=self.limit,
            up_offset=self.up_offset,
        )
        return y.to(x.dtype)

    def __str__(self) -> str:
        scale = "" if self.alpha == 1.0 else f"{self.alpha:g} · "
        offset = f" + {self.up_offset:g}" if self.up_offset else ""
        limit = f", clamped at {self.limit:g}" if self.limit is not None else ""
        layout = ", interleaved" if self.interleaved else ""
        return f"gate σ({scale}gate) (up{offset}){limit}{layout}"


def site(module: nn.Module) -> Hashable | None:
    """A key that modules with the same computation share, or None if these are no stacked experts by their looks."""
    names = {n for n, _ in module.named_parameters(recurse=False)}
    if not set(_WEIGHTS) <= names <= {*_WEIGHTS, *_BIASES} or any(True for _ in _of_children(module)):
        return None
    if not all(getattr(module, n).dim() == 3 for n in _WEIGHTS) or len(_parameters_of_forward(module)) != 3:
        return None
    return fingerprint(module)


def proof(module: nn.Module, device: torch.device) -> Proof:
    for child in module.children():
        x = prove.random((256,), torch.float32, device, seed=0)
        if not torch.allclose(child(x.clone()), F.silu(x)):
            return Proof.not_applicable(f"the activation {type(child).__name__} is not SiLU")
    if not (candidates := list(_candidates(module))):
        return Proof.not_applicable("the shapes of the weights are not those of gated experts")
    return prove.nearest(
        Proof.run(fusion, partial(_compare, module, fusion, device), layers=2) for fusion in candidates
    )


def register() -> None:
    """Make `experts_implementation="mindspeed"` known to transformers.

    A model that is set to it computes those of its experts with the fused operator that prove equal to their own code
    when they first run, and the others with transformers' grouped_mm. (`hf.apply` needs no registration: it replaces
    the forward of the modules that it proves, whichever implementation is set.)
    """
    from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

    ExpertsInterface.register("mindspeed", partial(_implementation, grouped_mm_experts_forward))


def _implementation(
    otherwise: Callable[..., Tensor], module: nn.Module, hidden_states: Tensor, *args: Tensor
) -> Tensor:
    if _PROVED not in vars(module):
        _prove_once(module)
    fusion = getattr(module, _PROVED)
    implementation = fusion if fusion and fusion.has_kernel(module, hidden_states) else otherwise
    return implementation(module, hidden_states, *args)


_PROVED = "_mindspeed_experts"  # the module's attribute: what proved equal to it, None if nothing did


@torch.compiler.disable
def _prove_once(module: nn.Module) -> None:
    device = _weight(module, "gate_up_proj").device
    with prove.undisturbed(device):
        result = (
            proof(module, device) if site(module) else Proof.not_applicable("not gated experts with stacked weights")
        )
    setattr(module, _PROVED, result.fusion)
    if result.fusion is None:
        warnings.warn(f"experts: {type(module).__name__} not fused: {result.reason}", stacklevel=2)


def _candidates(module: nn.Module) -> Iterator[FusedExperts]:
    """The options that the shapes allow, with the module's own numbers. Which are right, only the proof can tell."""
    _, rows, columns = _weight(module, "gate_up_proj").shape
    _, down_rows, down_columns = _weight(module, "down_proj").shape
    layouts = []
    if columns == down_rows and rows == 2 * down_columns:
        layouts.append(False)
    if rows == down_columns and columns == 2 * down_rows:
        layouts.append(True)
    numbers = sorted({v for v in vars(module).values() if isinstance(v, float) and v > 0})
    for options in itertools.product(layouts, (False, True), (1.0, *numbers), (None, *numbers), (0.0, 1.0)):
        yield FusedExperts(*options)


def _compare(module: nn.Module, fusion: FusedExperts, device: torch.device, dtype: torch.dtype) -> prove.Deviation:
    """Everything on inputs of usual sizes; values once more on large ones, which no clamp or cap leaves as they are.

    Where the activation saturates, or an element lies at its limit, the gradients of two correct computations differ.
    """
    num_experts, hidden_size, intermediate_size, tokens, top_k = 4, 24, 20, 128, 2
    twin: Any = prove.shallow_copy(module)
    twin.num_experts = num_experts
    if hasattr(module, "config"):  # the module's own forward, not the implementation that the model is set to
        twin.config = copy.copy(module.config)
        twin.config._experts_implementation = "eager"
    for seed, (layer, n_in, n_out) in enumerate(
        [("gate_up_proj", hidden_size, 2 * intermediate_size), ("down_proj", intermediate_size, hidden_size)]
    ):
        shape = (num_experts, n_in, n_out) if fusion.transposed else (num_experts, n_out, n_in)
        weight = prove.random(shape, dtype, device, seed=2 * seed) * n_in**-0.5
        setattr(twin, layer, nn.Parameter(weight))
        if getattr(module, f"{layer}_bias", None) is not None:
            bias = prove.random((num_experts, n_out), dtype, device, seed=2 * seed + 1)
            setattr(twin, f"{layer}_bias", nn.Parameter(bias))
    choice = prove.random((tokens, num_experts), torch.float32, device, seed=4)
    choice[:, 2] = -torch.inf  # an expert without tokens
    top_k_weights, top_k_index = choice.softmax(-1).topk(top_k)
    # One row for the comparison: each weight has a sum as gradient, which may cancel.
    leaf = top_k_weights.to(dtype).flatten().requires_grad_()

    def deviation(decades: tuple[float, float], leaves: list[Tensor]) -> prove.Deviation:
        x = prove.random_rows((tokens, hidden_size), dtype, device, decades=decades, seed=7)
        arguments = (twin, x, top_k_index, leaf.view(tokens, top_k))
        original = partial(type(module).forward, *arguments)
        return prove.deviation(original, partial(fusion, *arguments), [x, *leaves] if decades == (0, 0) else leaves)

    return prove.worst([deviation((0, 0), [leaf, *twin.parameters()]), deviation((1, 3), [twin.down_proj])])


def _weight(module: nn.Module, name: str) -> Tensor:
    return cast(Tensor, getattr(module, name))


def _of_children(module: nn.Module) -> Iterator[nn.Parameter]:
    return itertools.chain.from_iterable(child.parameters() for child in module.children())


def _parameters_of_forward(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())
