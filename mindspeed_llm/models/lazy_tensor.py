"""Tensors of which nothing is read until a part is asked for.

transformers' weight conversions (stack the experts, concatenate gate and up, transpose, ...) are plain tensor code. Run
on ``LazyTensor``, that code moves no data: it composes *readers*. Reading a box of the result then reads exactly the
matching boxes of the tensors in the files, so that a rank which owns two experts of a layer opens two experts' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mindspeed_llm.models.skeleton import Box

Reader = Callable[[Box, torch.Tensor], object]
"""Write the given box of a tensor into a target of the box's shape, casting to the target's dtype."""


class LazyTensor(torch.Tensor):
    """A tensor known by shape, dtype and a reader. Its values are not in memory."""

    reader: Reader

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, reader: Reader) -> LazyTensor:
        lazy = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        lazy.reader = reader
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if rule := _RULES.get(func):
            return rule(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            args, kwargs = tree_map_only(LazyTensor, LazyTensor.read_all, (args, kwargs or {}))
            return func(*args, **kwargs)
        return _deferred(func, args, kwargs or {})

    def read(self, box: Box, target: torch.Tensor) -> None:
        """Write ``self[box]`` into ``target``, which has the box's shape."""
        if target.numel():
            self.reader(box, target)

    def read_all(self) -> torch.Tensor:
        """The whole tensor, in its own dtype."""
        target = torch.empty(self.shape, dtype=self.dtype)
        self.read(tuple(slice(0, size) for size in self.shape), target)
        return target

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"


def _deferred(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation without a rule: its shapes now, its values, from whole inputs, when a part is asked for."""

    def result() -> Any:
        real_args, real_kwargs = tree_map_only(LazyTensor, LazyTensor.read_all, (args, kwargs))
        return func(*real_args, **real_kwargs)

    on_meta = tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs))
    shapes = func(*on_meta[0], **on_meta[1])
    if isinstance(shapes, torch.Tensor):
        return LazyTensor(shapes.shape, shapes.dtype, lambda box, target: target.copy_(result()[box]))
    pick = [lambda box, target, i=i: target.copy_(result()[i][box]) for i in range(len(shapes))]
    return [LazyTensor(s.shape, s.dtype, reader) for s, reader in zip(shapes, pick, strict=True)]


def _read(tensor: torch.Tensor, box: Box, target: torch.Tensor) -> None:
    if isinstance(tensor, LazyTensor):
        tensor.read(box, target)
    else:
        target.copy_(tensor[box])


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor:
    shape = _common_shape(tensors, "stacked")
    dim %= len(shape) + 1

    def reader(box: Box, target: torch.Tensor) -> None:
        for i in range(box[dim].start, box[dim].stop):
            _read(tensors[i], box[:dim] + box[dim + 1 :], target.select(dim, i - box[dim].start))

    return LazyTensor([*shape[:dim], len(tensors), *shape[dim:]], tensors[0].dtype, reader)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor:
    dim %= tensors[0].ndim
    shape = _common_shape(tensors, "concatenated", but=dim)

    def reader(box: Box, target: torch.Tensor) -> None:
        offset = 0  # where this tensor begins in the result
        for tensor in tensors:
            start = max(box[dim].start, offset)
            stop = min(box[dim].stop, offset + tensor.shape[dim])
            if start < stop:
                part = (*box[:dim], slice(start - offset, stop - offset), *box[dim + 1 :])
                _read(tensor, part, target.narrow(dim, start - box[dim].start, stop - start))
            offset += tensor.shape[dim]

    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return LazyTensor(shape, tensors[0].dtype, reader)


def _slice(
    tensor: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor:
    if step != 1:
        return _deferred(torch.ops.aten.slice.Tensor, (tensor, dim, start, end, step), {})
    dim %= tensor.ndim
    start, stop, _ = slice(start, end).indices(tensor.shape[dim])

    def reader(box: Box, target: torch.Tensor) -> None:
        part = slice(box[dim].start + start, box[dim].stop + start)
        tensor.read((*box[:dim], part, *box[dim + 1 :]), target)

    shape = [*tensor.shape[:dim], max(stop - start, 0), *tensor.shape[dim + 1 :]]
    return LazyTensor(shape, tensor.dtype, reader)


def _split_with_sizes(tensor: LazyTensor, sizes: Sequence[int], dim: int = 0) -> list[LazyTensor]:
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return [_slice(tensor, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> list[LazyTensor]:
    return [_slice(tensor, dim, start, start + size) for start in range(0, tensor.shape[dim], size)]


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def reader(box: Box, target: torch.Tensor) -> None:
        tensor.read(tuple(box[d] for d in order), target.transpose(dim0, dim1))

    return LazyTensor([tensor.shape[d] for d in order], tensor.dtype, reader)


def _common_shape(tensors: Sequence[torch.Tensor], verb: str, but: int | None = None) -> list[int]:
    shapes = [[size for d, size in enumerate(tensor.shape) if d != but] for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        found = sorted({str(list(tensor.shape)) for tensor in tensors})
        raise ValueError(f"tensors of the shapes {', '.join(found)} can't be {verb}")
    return list(tensors[0].shape)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.stack.default: _stack,
    _aten.cat.default: _cat,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.transpose.int: _transpose,
    _aten.clone.default: lambda tensor, memory_format=None: tensor,
    _aten.detach.default: lambda tensor: tensor,
}
