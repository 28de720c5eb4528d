"""What finding sites has in common for all operators: only a module's structure counts, never its class or its name."""

import inspect
from collections.abc import Hashable

import torch
from torch import nn

_MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, type(None), torch.dtype)


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether forward has one parameter, so that a fused forward of one parameter can be called in every way it can."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    return len(parameters) == 1 and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def fingerprint(module: nn.Module) -> Hashable:
    """Equal for modules of one class with equal attributes, parameter shapes and children: what holds for one holds for
    all of them."""
    attributes = ((k, v) for k, v in vars(module).items() if k not in _MODULE_INTERNALS)
    return (
        type(module),
        tuple(sorted((k, repr(v) if isinstance(v, _PLAIN) else id(v)) for k, v in attributes)),
        tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)),
        tuple((n, fingerprint(child)) for n, child in module.named_children()),
    )
