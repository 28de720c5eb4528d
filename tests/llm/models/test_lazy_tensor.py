"""Lazy tensors give what eager code gives, and read no more than they must."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.core_model_loading import Chunk, Interleave, MergeModulelist, PermuteForRope, Transpose

from mindspeed_llm.models.lazy_tensor import LazyTensor


class Recorded:
    """A lazy view of a tensor that remembers which boxes were read."""

    def __init__(self, *shape: int) -> None:
        self.values = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
        self.boxes: list[tuple[slice, ...]] = []
        self.lazy = LazyTensor(shape, torch.float32, self.read)

    def read(self, box, target) -> None:
        self.boxes.append(box)
        target.copy_(self.values[box])

    @property
    def elements_read(self) -> int:
        return sum(self.values[box].numel() for box in self.boxes)


OPERATIONS = {
    "stack": (lambda a, b: torch.stack([a, b], 1), [(3, 5), (3, 5)]),
    "cat": (lambda a, b: torch.cat([a, b], -1), [(3, 2), (3, 5)]),
    "chunk": (lambda a: torch.chunk(a, 3, dim=1)[1], [(4, 7)]),
    "split": (lambda a: torch.split(a, [2, 3, 2], dim=0)[1], [(7, 3)]),
    "slice": (lambda a: a[1:4, 2:], [(5, 6)]),
    "negative slice": (lambda a: a[-3:-1], [(5, 6)]),
    "transpose": (lambda a: a.transpose(0, 2).contiguous(), [(2, 3, 4)]),
    "experts": (
        lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], 1).transpose(1, 2),
        [(3, 5)] * 4,
    ),
    "step": (lambda a: a[::2], [(5, 2)]),
    "reshape": (lambda a: a.reshape(2, 3, 4).transpose(0, 1).reshape(6, 4), [(6, 4)]),
    "arithmetic": (lambda a: torch.exp2(a[1:] - 1), [(3, 4)]),
    "unbind": (lambda a: torch.stack(torch.unbind(a, 1)[::-1]), [(3, 4)]),
    "in place": (lambda a: torch.zeros(3, 4).copy_(a), [(3, 4)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_any_box_equals_the_eager_one(name, data):
    operation, shapes = OPERATIONS[name]
    sources = [Recorded(*shape) for shape in shapes]
    expected, lazy = operation(*(s.values for s in sources)), operation(*(s.lazy for s in sources))
    assert lazy.shape == expected.shape
    assert not any(source.boxes for source in sources) or name == "in place"
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in expected.shape]
    box = tuple(slice(*b) for b in bounds)
    target = torch.full(expected[box].shape, torch.nan, dtype=torch.float64)  # casts on the way
    if isinstance(lazy, LazyTensor):
        lazy.read(box, target)
    else:
        target.copy_(lazy[box])
    assert torch.equal(target, expected[box].double())


def test_only_the_asked_part_is_read():
    experts = [Recorded(4, 6) for _ in range(8)]
    stacked = torch.cat([torch.stack([e.lazy for e in experts]), torch.stack([e.lazy for e in experts])], dim=1)
    stacked.read((slice(2, 4), slice(1, 3), slice(0, 6)), torch.empty(2, 2, 6))
    assert [e.elements_read for e in experts] == [0, 0, 12, 12, 0, 0, 0, 0]
    assert experts[2].boxes == [(slice(1, 3), slice(0, 6))]


@pytest.mark.parametrize(
    ("operations", "shape", "targets"),
    [
        ([Chunk(dim=0), PermuteForRope(permute_layer_names=["q", "k"])], (24, 4), ["q", "k", "v"]),
        ([Interleave(dim=1)], (2, 8, 3), ["out"]),
        ([Transpose(1, 2)], (2, 8, 3), ["out"]),
    ],
)
def test_conversions_of_transformers(operations, shape, targets):
    class config:
        num_attention_heads = 2

    def convert(tensor):
        tensors = {"in": [tensor]}
        for operation in operations:
            tensors = operation.convert(tensors, source_patterns=["in"], target_patterns=targets, config=config)
        return tensors

    source = Recorded(*shape)
    lazy, expected = convert(source.lazy), convert(source.values)
    assert not source.boxes
    for target in targets:
        assert torch.equal(lazy[target].read_all(), expected[target]), target


def test_experts_of_different_shapes_are_refused():
    tensors = {"w": [Recorded(3, 4).lazy, Recorded(3, 5).lazy]}
    with pytest.raises(ValueError, match=r"\[3, 4\], \[3, 5\] can't be stacked"):
        MergeModulelist(0).convert(tensors, source_patterns=["w"], target_patterns=["out"])


def test_scalars_and_empty_tensors():
    for shape in [(), (0, 3)]:
        source = Recorded(*shape)
        assert torch.equal(source.lazy.read_all(), source.values)
