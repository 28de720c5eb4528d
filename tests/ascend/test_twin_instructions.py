"""What the twin's instructions compute, against NumPy models of their documentation.

The documentation is that of the public asc-devkit (docs/ascend.md names the commit), under
docs/zh/api/SIMD-API: the pages of the instructions' names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.ascend.native import report_of, twin_tests

OPERAND_BYTES = 8192
DTYPES = {"float32": np.float32, "float16": np.float16, "int32": np.int32}


def operand(array: np.ndarray | None = None) -> np.ndarray:
    """An operand's bytes: the array's, then a pattern."""
    memory = np.full(OPERAND_BYTES, 0x3C, np.uint8)  # a finite number in every format
    if array is not None:
        memory[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return memory


def pointer(memory: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(memory.ctypes.data)


def execute(
    name: str,
    a: np.ndarray,
    b: np.ndarray | None = None,
    *,
    integers: Sequence[int],
    number: float = 0.0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The bytes of the destination after the instruction."""
    memory, left, right = operand(out), operand(a), operand(b)
    numbers = (ctypes.c_int64 * 8)(*integers)
    arguments = (pointer(memory), pointer(left), pointer(right), numbers, ctypes.c_float(number))
    report = report_of(twin_tests().twin_instruction, name.encode(), *arguments)
    assert report.errors == []
    return memory


def sample(dtype: str, size: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=size) * 8
    return (values if dtype != "int32" else values * 100).astype(DTYPES[dtype])


BINARY = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum, "Min": np.minimum}
SCALAR = {"Adds": np.add, "Muls": np.multiply, "Maxs": np.maximum, "Mins": np.minimum}
TYPED = [(name, dtype) for name in BINARY for dtype in DTYPES if (name, dtype) != ("Div", "int32")]


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_binary(name: str, dtype: str):
    a, b = sample(dtype, 77), sample(dtype, 77, seed=1)
    out = execute(f"{name}.{dtype}", a, b, integers=[77]).view(DTYPES[dtype])
    np.testing.assert_array_equal(out[:77], BINARY[name](a, b))
    np.testing.assert_array_equal(out[77:], operand().view(DTYPES[dtype])[77:])  # nothing else is touched


def masked(function, dtype: str, mask: int, repeats: int, strides: Sequence[int], *sources: np.ndarray) -> np.ndarray:
    """The page on repeats: element e of block b of repeat r lies at r · repeat stride + b · block stride + e."""
    numpy_dtype = np.dtype(DTYPES[dtype])
    elements = 32 // numpy_dtype.itemsize
    block_strides, repeat_strides = strides[: len(strides) // 2], strides[len(strides) // 2 :]
    out = operand().view(numpy_dtype).copy()
    flat = [operand(s).view(numpy_dtype) for s in sources]

    def at(operand_index: int, repeat: int, lane: int) -> int:
        block = repeat * repeat_strides[operand_index] + lane // elements * block_strides[operand_index]
        return block * elements + lane % elements

    for repeat in range(repeats):
        for lane in range(mask):
            out[at(0, repeat, lane)] = function(*(s[at(i + 1, repeat, lane)] for i, s in enumerate(flat)))
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("strides", [(1, 1, 1, 8, 8, 8), (2, 1, 0, 17, 8, 1), (1, 3, 1, 9, 24, 0)])
def test_binary_in_repeats(dtype: str, strides: tuple[int, ...]):
    a, b = sample(dtype, 1024), sample(dtype, 1024, seed=1)
    mask = 256 // np.dtype(DTYPES[dtype]).itemsize - 5
    out = execute(f"Mul.masked.{dtype}", a, b, integers=[mask, 3, *strides])
    np.testing.assert_array_equal(out.view(DTYPES[dtype]), masked(np.multiply, dtype, mask, 3, strides, a, b))


@pytest.mark.parametrize("name", SCALAR)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar(name: str, dtype: str):
    a = sample(dtype, 77)
    number = DTYPES[dtype](3)
    out = execute(f"{name}.{dtype}", a, integers=[77], number=3.0).view(DTYPES[dtype])
    np.testing.assert_array_equal(out[:77], SCALAR[name](a, number))
    strides = (1, 2, 8, 17)
    out = execute(f"{name}.masked.{dtype}", a, integers=[13, 2, *strides], number=3.0).view(DTYPES[dtype])
    expected = masked(lambda x: SCALAR[name](x, number), dtype, 13, 2, strides, a)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("name", "function"), [("Exp", np.exp), ("Ln", np.log), ("Sqrt", np.sqrt), ("Abs", np.abs)])
def test_function(name: str, function, dtype: str):
    a = sample(dtype, 100) / DTYPES[dtype](4)
    a = np.abs(a) if name in ("Ln", "Sqrt") else a
    out = execute(f"{name}.{dtype}", a, integers=[100]).view(DTYPES[dtype])[:100]
    expected = function(a.astype(np.float32)).astype(DTYPES[dtype])
    np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), rtol=2 * np.finfo(a.dtype).eps)


def test_axpy_adds_to_the_destination():
    a, before = sample("float32", 40), sample("float32", 40, seed=1)
    out = execute("Axpy.float32", a, integers=[40], number=-2.5, out=before).view(np.float32)[:40]
    np.testing.assert_array_equal(out, before + a * np.float32(-2.5))


def test_duplicate():
    out = execute("Duplicate.float32", sample("float32", 8), integers=[9], number=1.5).view(np.float32)
    np.testing.assert_array_equal(out[:9], 1.5)
    np.testing.assert_array_equal(out[9:], operand().view(np.float32)[9:])


def test_duplicate_with_a_mask_of_bits():
    """Bit i of the mask is element i of the repeat."""
    bits = 0b1010_0000_0000_0110
    arguments = [bits, 0, 2, 1, 2]  # two repeats, blocks next to each other, repeats two blocks apart
    out = execute("Duplicate.masked.float32", sample("float32", 8), integers=arguments, number=7.0).view(np.float32)
    expected = operand().view(np.float32).copy()
    chosen = [i for i in range(64) if bits >> i & 1]
    for repeat in range(2):
        expected[[i + repeat * 16 for i in chosen]] = 7.0
    np.testing.assert_array_equal(out, expected)


def rounded(x: np.ndarray, fraction_bits: int, min_exponent: int, mode: str) -> np.ndarray:
    """Float64 numbers to a format's, by the definition of the mode."""
    exponent = np.maximum(np.floor(np.log2(np.abs(x), where=x != 0, out=np.zeros_like(x))), min_exponent)
    unit = 2.0 ** (exponent - fraction_bits)
    units = x / unit
    if mode == "odd":
        below = np.trunc(units)
        return np.where((below != units) & (below % 2 == 0), below + np.sign(units), below) * unit
    away = np.sign(units) * np.floor(np.abs(units) + 0.5)
    return {
        "rint": np.rint(units),
        "floor": np.floor(units),
        "ceil": np.ceil(units),
        "round": away,
        "trunc": np.trunc(units),
    }[mode] * unit


MODES = ["none", "rint", "floor", "ceil", "round", "trunc", "odd"]
FORMATS = {"float16": (10, -14, torch.float16), "bfloat16": (7, -126, torch.bfloat16)}
ROUNDED = [(f, m) for f in FORMATS for m in MODES[1:] if (f, m) != ("bfloat16", "odd")]


@pytest.mark.parametrize(("name", "mode"), ROUNDED)
def test_cast_to_half_precision(name: str, mode: str):
    fraction_bits, min_exponent, dtype = FORMATS[name]
    generator = np.random.default_rng(0)
    x = (generator.normal(size=500) * 2.0 ** generator.integers(-20, 10, 500)).astype(np.float32)
    ties = (1 + (np.arange(40) + 0.5) * 2.0**-fraction_bits).astype(np.float32)
    x = np.concatenate([x, ties, -ties, np.zeros(1, np.float32)])
    out = execute(f"Cast.float32.{name}", x, integers=[len(x), MODES.index(mode)]).view(np.int16)[: len(x)]
    actual = torch.from_numpy(out.copy()).view(dtype).double().numpy()
    np.testing.assert_array_equal(actual, rounded(x.astype(np.float64), fraction_bits, min_exponent, mode))


@pytest.mark.parametrize("name", FORMATS)
def test_cast_agrees_with_pytorch_at_the_extremes(name: str):
    x = np.array([0, -0.0, 65504, 65519, 65520, -7e4, 3.4e38, 1e-8, 6e-8, -6.1e-5, np.inf, -np.inf, np.nan], np.float32)
    out = execute(f"Cast.float32.{name}", x, integers=[len(x), MODES.index("rint")]).view(np.int16)[: len(x)]
    actual = torch.from_numpy(out.copy()).view(FORMATS[name][2])
    torch.testing.assert_close(actual, torch.from_numpy(x).to(FORMATS[name][2]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_cast_widens_every_number(name: str):
    for start in range(0, 1 << 16, 2048):
        bits = torch.arange(start, start + 2048).to(torch.int16)
        source = bits.view(FORMATS[name][2])
        out = execute(f"Cast.{name}.float32", bits.numpy(), integers=[2048, 0]).view(np.float32)
        torch.testing.assert_close(torch.from_numpy(out), source.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("target", "dtype"), [("int32", np.int32), ("int16", np.int16), ("float32", np.float32)])
@pytest.mark.parametrize("mode", ["rint", "floor", "ceil", "round", "trunc"])
def test_cast_to_whole_numbers(target: str, dtype, mode: str):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4, 2.6, -2.4, -2.6, 1e4], np.float32)
    out = execute(f"Cast.float32.{target}", x, integers=[len(x), MODES.index(mode)]).view(dtype)[: len(x)]
    away = np.sign(x) * np.floor(np.abs(x) + 0.5)
    modes = {"rint": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": lambda _: away}
    np.testing.assert_array_equal(out, modes[mode](x))


def test_cast_saturates_integers():
    x = np.array([1e10, -1e10, 40000], np.float32)
    out = execute("Cast.float32.int32", x, integers=[3, MODES.index("rint")]).view(np.int32)[:3]
    assert out.tolist() == [2**31 - 1, -(2**31), 40000]
    out = execute("Cast.float32.int16", x, integers=[3, MODES.index("rint")]).view(np.int16)[:3]
    assert out.tolist() == [32767, -32768, 32767]


def test_cast_of_integers_rounds_to_24_bits():
    x = np.array([2**24 + 1, 2**24 + 3, -(2**24) - 1, 7, 0], np.int32)
    out = execute("Cast.int32.float32", x, integers=[5, MODES.index("rint")]).view(np.float32)[:5]
    np.testing.assert_array_equal(out, x.astype(np.float32))
    out = execute("Cast.int32.float32", x, integers=[5, MODES.index("ceil")]).view(np.float32)[:5]
    assert out.tolist() == [2**24 + 2, 2**24 + 4, -(2**24), 7, 0]


def pairwise(values: np.ndarray) -> np.ndarray:
    """The sum of a repeat: neighbours first."""
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [1, 50, 64, 200, 517])
def test_reduce_sum(dtype: str, count: int):
    """To the last bit: pairwise within a repeat, repeats one after the other."""
    a = sample(dtype, count)
    lanes = 256 // a.itemsize
    padded = np.pad(a, (0, -count % lanes)).reshape(-1, lanes)
    expected = pairwise(padded[0])
    for repeat in padded[1:]:
        expected = expected + pairwise(repeat)
    out = execute(f"ReduceSum.{dtype}", a, integers=[count, 3]).view(DTYPES[dtype])
    assert out[3] == expected
    assert out[4] == operand().view(DTYPES[dtype])[4]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_reduce_max(dtype: str):
    a = sample(dtype, 517)
    out = execute(f"ReduceMax.{dtype}", a, integers=[517, 5]).view(DTYPES[dtype])
    assert out[5] == a.max()
    assert out[6] == operand().view(DTYPES[dtype])[6]


def test_whole_reduce_sum():
    a = sample("float32", 1024)
    # 13 elements of 5 repeats, results 3 apart, blocks 2 apart, repeats 9 apart
    out = execute("WholeReduceSum.float32", a, integers=[13, 5, 3, 2, 9]).view(np.float32)
    for repeat in range(5):
        at = repeat * 72
        chosen = np.concatenate([a[at : at + 8], a[at + 16 : at + 21], np.zeros(51, np.float32)])
        assert out[repeat * 3] == pairwise(chosen)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_brcb(dtype: str):
    a = sample(dtype, 16)
    block = 32 // a.itemsize
    out = execute(f"Brcb.{dtype}", a, integers=[2, 1, 8]).view(DTYPES[dtype])
    np.testing.assert_array_equal(out[: 16 * block], np.repeat(a, block))
    out = execute(f"Brcb.{dtype}", a, integers=[2, 2, 17]).view(DTYPES[dtype]).reshape(-1, block)
    for i in range(16):
        np.testing.assert_array_equal(out[i // 8 * 17 + i % 8 * 2], a[i])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gather(dtype: str):
    a = sample(dtype, 300)
    index = np.random.default_rng(2).integers(0, 200, 77)
    offsets = (index * a.itemsize).astype(np.uint32)
    out = execute(f"Gather.{dtype}", a, offsets, integers=[77, 10 * a.itemsize]).view(DTYPES[dtype])
    np.testing.assert_array_equal(out[:77], a[index + 10])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_compare_and_select(dtype: str):
    a = sample(dtype, 256)
    a[7] = 1.5
    comparisons = [np.less, np.greater, np.equal, np.less_equal, np.greater_equal, np.not_equal]
    for mode, comparison in enumerate(comparisons):
        out = execute(f"CompareScalar.{dtype}", a, integers=[256, mode], number=1.5)[:32]
        np.testing.assert_array_equal(np.unpackbits(out, bitorder="little").astype(bool), comparison(a, 1.5))
    bits = np.packbits(a < 0, bitorder="little")
    out = execute(f"Select.{dtype}", a, bits, integers=[100], number=9.0).view(DTYPES[dtype])
    np.testing.assert_array_equal(out[:100], np.where(a < 0, a, 9.0)[:100].astype(a.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("left", "right", "pad"), [(0, 0, False), (3, 2, True), (3, 2, False), (0, 0, True)], ids=str)
def test_data_copy_pad(dtype: str, left: int, right: int, pad: bool):
    """Rows of 11 elements, 4 apart in global memory and one block in local memory."""
    rows, length, gap, dst_gap = 5, 11, 4, 1
    a = sample(dtype, 300)
    out = np.zeros(OPERAND_BYTES, np.uint8)
    source = operand(a)
    integers = (ctypes.c_int64 * 8)(rows, length, gap, left, right, pad, dst_gap)
    half = dtype == "float16"
    report = report_of(twin_tests().twin_pad_copy, half, pointer(out), pointer(source), integers, ctypes.c_float(2.5))
    assert report.errors == []
    block = 32 // a.itemsize
    filled = -(-(left + length + right) // block) * block
    table = out.view(DTYPES[dtype])
    minus_one = np.full(8, -1.0, np.float32).view(DTYPES[dtype])
    for row in range(rows):
        begin = row * (filled + dst_gap * block)
        source_row = a[row * (length + gap) :][:length]
        np.testing.assert_array_equal(table[begin + left :][:length], source_row)
        around = np.delete(table[begin : begin + filled], np.s_[left : left + length])
        if pad:
            np.testing.assert_array_equal(around, np.full_like(around, 2.5))
        elif left + right == 0:
            np.testing.assert_array_equal(around, np.full_like(around, source_row[0]))
        else:
            assert np.isnan(around).all()  # anything
        np.testing.assert_array_equal(table[begin + filled :][:block], minus_one[:block])  # the gap


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_data_copy_pad_stores_rows_only(dtype: str):
    rows, length, gap, src_gap = 5, 11, 4, 1
    a = sample(dtype, 500)
    out = operand()
    integers = (ctypes.c_int64 * 8)(rows, length, gap, src_gap)
    source = operand(a)
    report = report_of(twin_tests().twin_pad_store, dtype == "float16", pointer(out), pointer(source), integers)
    assert report.errors == []
    block = 32 // a.itemsize
    distance = (-(-length // block) + src_gap) * block
    expected = operand().view(DTYPES[dtype]).copy()
    for row in range(rows):
        expected[row * (length + gap) :][:length] = a[row * distance :][:length]
    np.testing.assert_array_equal(out.view(DTYPES[dtype]), expected)
