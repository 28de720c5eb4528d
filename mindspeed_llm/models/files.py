"""The safetensors files of a model folder, opened so that any part of any tensor can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mindspeed_llm.errors import DataError
from mindspeed_llm.models.lazy_tensor import LazyTensor
from mindspeed_llm.models.skeleton import Box

_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")


@contextmanager
def open_checkpoint(folder: str | Path) -> Iterator[dict[str, LazyTensor]]:
    """Every tensor of the safetensors checkpoint in ``folder`` by name. Only headers are read; files stay open.

    Raises DataError when there is no checkpoint, a file is missing or damaged, or files and index disagree.
    """
    folder = Path(folder)
    listed = _read_index(folder)
    paths = sorted(folder.glob("*.safetensors")) if listed is None else sorted({folder / f for f in listed.values()})
    if not paths:
        raise DataError(_nothing_found(folder))
    tensors: dict[str, LazyTensor] = {}
    with ExitStack() as stack:
        for path in paths:
            file = _open(path, stack)
            for name in file.keys():  # noqa: SIM118  # not a dict
                if listed is None and name in tensors:
                    raise DataError(f"{folder}: tensor {name} is in more than one file and there is no {_INDEX}")
                if listed is None or listed.get(name) == path.name:
                    tensors[name] = _lazy(file, name)
        if absent := sorted(set(listed or ()) - set(tensors)):
            raise DataError(f"{folder / _INDEX} lists {_some(absent)}, which the file named there does not hold")
        yield tensors


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / _INDEX
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a safetensors index: {error!r}") from None


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_FORMATS)
    found = f"; it has {', '.join(others[:3])}: convert with transformers' save_pretrained first" if others else ""
    return f"{folder} has no *.safetensors file{found}; model.train_from_scratch: true begins with random weights"


def _open(path: Path, stack: ExitStack) -> Any:
    if not path.is_file():
        raise DataError(f"{path} is missing, but {_INDEX} lists it")
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged or cut short: {error}") from None


def _lazy(file: Any, name: str) -> LazyTensor:
    part = file.get_slice(name)
    shape = part.get_shape()
    dtype = part[:0].dtype if shape else file.get_tensor(name).dtype

    def reader(box: Box, target: torch.Tensor) -> None:
        target.copy_(part[box] if box else file.get_tensor(name))

    return LazyTensor(shape, dtype, reader)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
