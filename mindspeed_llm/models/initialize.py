"""Random initialisation by the model's own rules, the same numbers for every sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from mindspeed_llm.errors import UserError
from mindspeed_llm.models.skeleton import local_part, materialize, named_state, original_class, skeleton


@dataclass(frozen=True)
class _Call:
    """``owner._init_weights(module)``: how transformers initialises a module."""

    owner: PreTrainedModel
    module: nn.Module

    def __call__(self) -> None:
        self.owner._init_weights(self.module)


@torch.no_grad()
@guard_torch_init_functions()
def initialize_weights(model: PreTrainedModel, seed: int, device: torch.device | str | None = None) -> None:
    """Give every parameter of ``model`` the random value that its class's ``_init_weights`` draws.

    Each module's values come from a generator of its own, seeded by ``seed`` and the module's place in the model. The
    full tensors of one module at a time are drawn on the CPU, on every rank alike, and each rank keeps its parts:
    hence the values depend neither on the number of ranks nor on the sharding. No communication. The distribution is
    that of ``AutoModelForCausalLM.from_config``; the values are not, as that draws all from one generator.

    Parameters may be on the meta device (they are then made on ``device``, by default their mesh's) or real.
    Raises UserError that names a parameter which ``_init_weights`` leaves out.
    """
    materialize(model, device)
    template = skeleton(model)
    for tied in template.all_tied_weights_keys:  # the source's values count, those drawn for the other name do not
        _replace(template, tied, nn.Parameter(template.get_parameter(tied).detach().clone()))
    state, names = named_state(model), {id(p): name for name, p in template.named_parameters()}

    done = set(template.all_tied_weights_keys)
    groups = _independent_groups(template, names)
    # One buffer for all: fresh memory for every tensor would scatter over the heap and stay there.
    buffer = torch.empty(max(sum(state[name].numel() for name in parameters) for _, parameters in groups))
    for place, (calls, parameters) in enumerate(groups):
        sizes = [state[name].numel() for name in sorted(parameters)]
        for name, values in zip(sorted(parameters), buffer[: sum(sizes)].fill_(torch.nan).split(sizes), strict=True):
            _replace(template, name, nn.Parameter(values.view(state[name].shape)))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed(seed, place))
            for call in calls:
                call()
        for name in parameters - set(template.all_tied_weights_keys):
            drawn = template.get_parameter(name)
            local, box = local_part(state[name])
            local.copy_(drawn[box])
            if not drawn.sum().isnan():
                done.add(name)
            _replace(template, name, nn.Parameter(drawn.to("meta")))
    if forgotten := sorted(set(names.values()) - done):
        raise UserError(
            f"{original_class(model).__name__}._init_weights does not initialise {', '.join(forgotten[:5])}; "
            "a model that is trained from scratch must give every parameter a value there"
        )


def _seed(seed: int, place: int) -> int:
    return int(np.random.SeedSequence([seed, place]).generate_state(1, np.uint64)[0])


def _calls(owner: PreTrainedModel, module: nn.Module) -> Iterator[_Call]:
    """In transformers' order: children first; a model inside the model initialises its own modules."""
    for child in module.children():
        yield from _calls(child if isinstance(child, PreTrainedModel) else owner, child)
    yield _Call(owner, module)


def _independent_groups(template: PreTrainedModel, names: dict[int, str]) -> list[tuple[list[_Call], set[str]]]:
    """Calls that write to a common parameter belong together, in their order: a block may rescale what its layers drew.

    Which parameters a call writes to is found by running it on the meta device.
    """
    groups: list[tuple[list[_Call], set[str]]] = []
    for call in _calls(template, template):
        with _Writes() as writes:
            call()
        touched = {names[id(p)] for p in call.module.parameters() if p.untyped_storage()._cdata in writes.storages}
        if not touched:
            continue
        calls, parameters = [call], touched
        for group in [g for g in groups if g[1] & touched]:
            groups.remove(group)
            calls, parameters = group[0] + calls, group[1] | parameters
        groups.append((calls, parameters))
    return groups


class _Writes(TorchDispatchMode):
    """Records the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value, declared in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, torch.Tensor) and declared.alias_info is not None and declared.alias_info.is_write:
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = parameter
