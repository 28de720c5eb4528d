"""The stand-in device with all that the tests compute on it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401

from mindspeed_kernels.npu import ascendc, choice, dispatch
from tests.ascend.device import host_memory, vendor_models


class Device:
    """Keeps the kernels registered, and knows which of the vendor's operators and of our AscendC kernels ran.

    ``library`` holds our operators for the NPU, built with the kernels' CPU twin.
    """

    def __init__(self, library: Path) -> None:
        ascendc.LIBRARY, kernel = library, ascendc._kernel
        ascendc._kernel = lambda op: self._counted(f"ascendc {op}", kernel(op))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each replacement of a kernel
            models = torch.library.Library("npu", "IMPL")
            self._libraries = [*host_memory.install(), models]
            for name, model in vendor_models.MODELS.items():
                models.impl(name, self._spy(name, model), host_memory.KEY, allow_override=True)
        self.called: list[str] = []

    def _counted(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.called.append(name)
            return kernel(*args)

        return run

    def _spy(self, name: str, model: Callable[..., Any]) -> Callable[..., Any]:
        compute = host_memory.through_host(model)
        schema = getattr(torch.ops.npu, name).default._schema.arguments

        def run(*args: Any, **kwargs: Any) -> Any:
            """Models get arguments by their names in the schema, without those that are its defaults."""
            self.called.append(name)
            given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
            defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
            return compute(
                **{
                    k: v
                    for k, v in given.items()
                    if isinstance(v, torch.Tensor) or k not in defaults or v != defaults[k]
                }
            )

        return run


@contextmanager
def implementation(text: str) -> Iterator[None]:
    """With MINDSPEED_NPU_IMPL as given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, choice.VARIABLE, text)
        dispatch.dispatcher.cache_clear()
        yield
    dispatch.dispatcher.cache_clear()
