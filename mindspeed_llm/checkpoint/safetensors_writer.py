"""Write safetensors files one tensor at a time.

The library's own ``save_file`` wants all tensors of a file at once. The format is a header that lists every tensor's
type, shape and place, then the bytes in that order (https://github.com/huggingface/safetensors#format): once the shapes
are known, the values can follow one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Entry = tuple[str, torch.Tensor]
"""Name and tensor; where only the layout matters the tensor may be on the meta device."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_sharded(folder: Path, layout: Sequence[Entry], tensors: Iterable[Entry], max_file_bytes: int) -> None:
    """Write ``model.safetensors``, or several files of at most ``max_file_bytes`` and ``model.safetensors.index.json``.

    ``layout`` is what will be written, in order; ``tensors`` yields the same names, shapes and dtypes with values. Each
    tensor is written as it comes and not kept. A tensor larger than the limit gets a file of its own.
    """
    files = _distribute(layout, max_file_bytes)
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    values, weight_map = iter(tensors), {}
    for file_name, entries in zip(names, files, strict=True):
        with (folder / file_name).open("wb") as file:
            file.write(_header(entries))
            for (key, expected), (written, tensor) in zip(entries, values, strict=False):
                if (written, tensor.shape, tensor.dtype) != (key, expected.shape, expected.dtype):
                    raise RuntimeError(f"{written} {tensor.shape} {tensor.dtype} came where {key} was announced")
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
                weight_map[written] = file_name
    if len(weight_map) != len(layout):
        raise RuntimeError(f"{len(layout)} tensors were announced and {len(weight_map)} came")
    if len(files) > 1:
        total = {"total_size": sum(_size(tensor) for _, tensor in layout)}
        index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")


def _distribute(layout: Sequence[Entry], max_file_bytes: int) -> list[list[Entry]]:
    files: list[list[Entry]] = [[]]
    room = max_file_bytes
    for entry in layout:
        if _size(entry[1]) > room and files[-1]:
            files.append([])
            room = max_file_bytes
        files[-1].append(entry)
        room -= _size(entry[1])
    return files


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in entries:
        end = offset + _size(tensor)
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins aligned
    return len(text).to_bytes(8, "little") + text


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
