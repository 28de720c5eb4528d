"""Give one module instance another forward, and take it away again.

The instance's class is exchanged for a subclass of it that differs in `forward` alone, the way `fully_shard` and
`torch.nn.utils.parametrize` do it. Neither the class nor its module changes, and an instance that is not touched keeps
its forward. Against a `module.forward = ...` in the instance's dictionary this

* survives `copy.deepcopy` and `pickle`: the copy is fused too, and uses its own parameters;
* is a plain method to `torch.compile`: layers share one class and one compilation, where a callable per instance would
  be guarded by its identity and compiled once a layer;
* leaves `isinstance`, the class name (`_init_weights`, wrapping policies), `state_dict` and hooks as they were.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import nn


class Variant(Hashable, Protocol):
    """What may be put in the place of a computation."""

    def __str__(self) -> str:
        """It in a few words, for the report."""
        ...


class Fusion(Variant, Protocol):
    """What replaces a forward. Hashable (equal fusions share a class) and picklable (it travels with the module)."""

    def build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The fused forward `f(module, ...)` for modules whose class has the forward `original(module, ...)`."""
        ...


def fuse(module: nn.Module, fusion: Fusion) -> None:
    """Replace the forward of this instance."""
    module.__class__ = _fused_class(type(module), fusion)  # type: ignore[arg-type]  # a class is hashable, mypy


def fusion_of(module: nn.Module) -> Fusion | None:
    """The fusion in force on this instance."""
    return getattr(type(module), "_mindspeed_fusion", None)


def restore(module: nn.Module) -> None:
    """Undo `fuse`."""
    cls = type(module)
    if "_mindspeed_fusion" not in vars(cls):
        raise RuntimeError(
            f"{cls.__name__} has been given another class since it was fused (by fully_shard?): restore it before that"
        )
    (module.__class__,) = cls.__bases__


@functools.cache
def _fused_class(cls: type[nn.Module], fusion: Fusion) -> type[nn.Module]:
    namespace = {
        "forward": functools.wraps(cls.forward)(fusion.build(cls.forward)),
        "_mindspeed_fusion": fusion,
        "__reduce_ex__": lambda module, protocol: (_blank, (cls, fusion), module.__getstate__()),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), namespace)


def _blank(cls: type[nn.Module], fusion: Fusion) -> nn.Module:
    """What pickle and deepcopy fill with the module's state."""
    fused_class = _fused_class(cls, fusion)  # type: ignore[arg-type]
    return fused_class.__new__(fused_class)
