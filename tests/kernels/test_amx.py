"""Products with AMX's tiles, for which a model stands in: the model, the errors that it catches, the products."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_kernels import _C
from tests.kernels.compare import assert_close

ROOT = Path(__file__).resolve().parents[2]
LEVEL = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"]
TILE, PAIRS = 16, 16  # rows of a tile, and pairs of bfloat16 in each

needs_model = pytest.mark.skipif(
    _C.detected_cpu_capability() not in ("avx512_bf16", "amx"), reason="the model of the tiles needs AVX512-BF16"
)
pytestmark = needs_model


class TileConfiguration(ctypes.Structure):
    _fields_ = [
        ("palette", ctypes.c_uint8),
        ("start_row", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 14),
        ("row_bytes", ctypes.c_uint16 * 16),
        ("rows", ctypes.c_uint8 * 16),
    ]


def configuration(rows: list[int], row_bytes: list[int], palette: int = 1, start_row: int = 0, reserved: int = 0):
    return TileConfiguration(palette, start_row, (reserved,), tuple(row_bytes), tuple(rows))


WHOLE = configuration([16] * 3, [64] * 3)


def compile_source(name: str, to: Path, *flags: str, root: Path = ROOT) -> Path:
    """A file of this test's folder, with the headers below root."""
    source = Path(__file__).parent / "amx" / name
    level = [f"-m{feature}" for feature in LEVEL]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", *level, *flags, f"-I{root}", str(source), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to


def build(folder: Path, root: Path = ROOT, source: str = "library.cpp") -> Path:
    return compile_source(source, folder / "library.so", "-O1", "-ffp-contract=fast", "-fPIC", "-shared", root=root)


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="module")
def library(library_path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path))


# ---- The instructions.


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
def test_instructions(tmp_path: Path) -> None:
    """Those written in assembly, which no machine without AMX can run, are those that the compiler makes."""
    compiled = compile_source("instructions.cpp", tmp_path / "instructions.o", "-O1", "-mamx-tile", "-mamx-bf16", "-c")
    listing = subprocess.run(["objdump", "-d", compiled], capture_output=True, text=True, check=True).stdout
    ours, intrinsics = (
        re.findall(r"\t(\w+ .*tmm.*|ldtilecfg .*|tilerelease)", listing.split(f"<{name}>:")[1].split("ret")[0])
        for name in ("ours", "intrinsics")
    )
    assert ours == intrinsics
    assert len(ours) == 6


# ---- The model of them.


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def multiply_tiles(library: ctypes.CDLL, a: Tensor, b: Tensor, before: Tensor, shape=WHOLE) -> Tensor:
    """before [16, 16] + a [16 rows, 32] · b [16 pairs, 32], where b's row holds a pair for each column."""
    sums = before.clone()
    library.multiply_tiles(ctypes.byref(shape), pointer(a), pointer(b), pointer(sums))
    return sums


def test_order_of_sums(library: ctypes.CDLL) -> None:
    """As Intel's manual says: one sum of the pairs' lower halves, one of the upper, both added, then onto the tile."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(TILE, 2 * PAIRS, generator=generator).bfloat16() for _ in range(2))
    before = torch.randn(TILE, TILE, generator=generator)
    halves = torch.zeros(2, TILE, TILE)
    for k in range(PAIRS):
        for half in range(2):  # the product of two bfloat16 is exact in float32
            halves[half] += a[:, 2 * k + half].float().outer(b[k, half::2].float())
    assert torch.equal(multiply_tiles(library, a, b, before), before + (halves[0] + halves[1]))


@pytest.mark.parametrize(
    ("a", "b", "before", "expected"),
    [
        ((2.0**-130, 0), (2.0**100, 0), 0.0, 0.0),
        ((2.0**-126, 0), (2.0**100, 0), 0.0, 2.0**-26),
        ((2.0**-70, 0), (2.0**-70, 0), 0.0, 0.0),
        ((0, 0), (0, 0), 2.0**-130, 0.0),
        ((1.5 * 2.0**-126, 1.0), (1.0, -(2.0**-126)), 0.0, 0.0),  # their sum is subnormal
        ((1.0, 0), (1.5 * 2.0**-126, 0), -(2.0**-126), 0.0),  # the sum with the tile is
        ((1.0, 2.0**-60), (2.0**-126, 2.0**-60), 0.0, 2.0**-126 + 2.0**-120),
        ((torch.inf, 0), (-1.0, 0), 1.0, -torch.inf),
        ((2.0**127, 0), (2.0, 0), 0.0, torch.inf),
        ((2.0**100, -(2.0**100)), (2.0**100, 2.0**100), 0.0, torch.nan),  # inf - inf: the halves are apart
    ],
    ids=str,
)
def test_range(library: ctypes.CDLL, a, b, before: float, expected: float) -> None:
    left, right = torch.zeros(2, TILE, 2 * PAIRS, dtype=torch.bfloat16)
    left[3, :2], right[0, 10:12] = torch.tensor(a), torch.tensor(b)
    sums = multiply_tiles(library, left, right, torch.full((TILE, TILE), before))
    assert torch.equal(sums[3, 5].nan_to_num(nan=7.0), torch.tensor(expected).nan_to_num(nan=7.0))


def test_product_of_a_pair_is_fused(library: ctypes.CDLL) -> None:
    """A product too small for float32 still counts in its sum."""
    left, right = torch.zeros(2, TILE, 2 * PAIRS, dtype=torch.bfloat16)
    left[0, 0], right[0, 0] = 1.0, 2.0**-110
    left[0, 2], right[1, 0] = 2.0**-65, 2.0**-65
    assert multiply_tiles(library, left, right, torch.zeros(TILE, TILE))[0, 0] == 2.0**-110 + 2.0**-130


def test_smaller_tiles(library: ctypes.CDLL) -> None:
    """Only what the configuration says takes part."""
    rows, pairs, columns = 5, 3, 7
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(TILE, 2 * PAIRS, generator=generator).bfloat16() for _ in range(2))
    before = torch.randn(TILE, TILE, generator=generator)
    shape = configuration([rows, rows, pairs], [4 * columns, 4 * pairs, 4 * columns])
    expected = before.double()
    small_b = b[:pairs, : 2 * columns].unflatten(1, (columns, 2)).permute(0, 2, 1).flatten(0, 1)
    expected[:rows, :columns] += a[:rows, : 2 * pairs].double() @ small_b.double()
    assert_close(multiply_tiles(library, a, b, before, shape), expected, "sums")


# ---- Errors that a processor would not let pass.


def fault(library_path: Path, call: str) -> str:
    """What the model says before it ends the process."""
    code = f"import ctypes; library = ctypes.CDLL('{library_path}'); tile = ctypes.create_string_buffer(1024); {call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -6, done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, "#UD in TILELOADD: no configuration is loaded"),
        (configuration([16] * 3, [64] * 3, palette=0), "#UD in TILELOADD: no configuration is loaded"),
        (configuration([16] * 3, [64] * 3, palette=2), "#GP in LDTILECFG: unknown palette"),
        (configuration([16] * 3, [64] * 3, start_row=1), "#GP in LDTILECFG: a start row"),
        (configuration([16] * 3, [64] * 3, reserved=1), "#GP in LDTILECFG: a reserved byte is not zero"),
        (configuration([16] * 9, [64] * 8), "#GP in LDTILECFG: a reserved byte is not zero"),
        (configuration([17] * 3, [64] * 3), "#GP in LDTILECFG: a tile is too large"),
        (configuration([16] * 3, [64, 64, 68]), "#GP in LDTILECFG: a tile is too large"),
        (configuration([16] * 3, [64] * 2), "#GP in LDTILECFG: a tile has rows without columns"),
        (configuration([16] * 2, [64] * 2), "#UD in TILELOADD: the configuration leaves the tile out"),
        (configuration([16] * 3, [64, 62, 64]), "#UD in TDPBF16PS: rows must be whole pairs"),
        (configuration([16, 15, 16], [64] * 3), "#UD in TDPBF16PS: the left tile's rows"),
        (configuration([16] * 3, [64, 64, 60]), "#UD in TDPBF16PS: the right tile's columns"),
        (configuration([16, 16, 15], [64] * 3), "#UD in TDPBF16PS: the left tile's columns"),
    ],
    ids=lambda value: value.split(": ")[1] if isinstance(value, str) else "",
)
def test_wrong_configurations(library_path: Path, shape: TileConfiguration | None, message: str) -> None:
    argument = None if shape is None else bytes(shape)
    assert message in fault(library_path, f"library.multiply_tiles({argument}, tile, tile, tile)")


def test_wrong_use(library_path: Path) -> None:
    assert "#UD in TILEZERO: no configuration is loaded" in fault(library_path, "library.use_after_release()")
    assert "#UD in TDPBF16PS: the three tiles must differ" in fault(library_path, "library.multiply_in_place()")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("tile_load_configuration(kConfiguration);", "", "#UD in TILEZERO: no configuration is loaded"),
        ("{16, 16, 16, 16, 16,", "{16, 16, 16, 16, 15,", "#UD in TDPBF16PS: the left tile's rows"),
        ("{64, 64, 64, 64, 64,", "{64, 64, 64, 64, 60,", "#UD in TDPBF16PS: the left tile's columns"),
        ("{64, 64, 64, 64,", "{64, 64, 60, 64,", "#UD in TDPBF16PS: the right tile's columns"),
        ("tile_multiply_add<3, 5, 7>", "tile_multiply_add<3, 5, 5>", "#UD in TDPBF16PS: the three tiles must differ"),
    ],
)
def test_seeded_errors(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    """Mistakes in the product's own source."""
    shutil.copytree(ROOT / "csrc" / "cpu" / "common", tmp_path / "csrc" / "cpu" / "common")
    product = tmp_path / "csrc" / "cpu" / "common" / "gemm_amx.h"
    assert right in product.read_text()
    product.write_text(product.read_text().replace(right, wrong))
    assert message in fault(build(tmp_path, tmp_path), "library.multiply_whole_tiles()")


# ---- Products of matrices.


def multiply(
    library: ctypes.CDLL,
    a: Tensor,
    b: Tensor,
    *,
    index: Tensor | None = None,
    onto: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """a[index] · b (+ onto), of any strides that a kernel passes on."""

    def stored(operand: Tensor) -> tuple:
        transposed = operand.stride(1) != 1
        return pointer(operand), ctypes.c_int64(operand.stride(1 if transposed else 0)), ctypes.c_bool(transposed)

    rows = a.shape[0] if index is None else len(index)
    c = torch.empty(rows, b.shape[1], dtype=torch.bfloat16 if rounded else torch.float32)
    if onto is not None:
        c.copy_(onto)
    sums = torch.empty(rows, b.shape[1]) if rounded else None
    sizes = map(ctypes.c_int64, (rows, b.shape[1], a.shape[1]))
    library.multiply(
        *sizes, *stored(a), pointer(index), *stored(b), pointer(c), ctypes.c_bool(onto is not None), pointer(sums)
    )
    return c


def operands(m: int, n: int, k: int, a_transposed: bool, b_transposed: bool) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [k, n] inside larger matrices of NaN, so that reading past their ends shows."""

    def operand(rows: int, columns: int, transposed: bool) -> Tensor:
        if transposed:
            return operand(columns, rows, False).t()
        around = torch.full((rows + 2, columns + 40), torch.nan, dtype=torch.bfloat16)
        around[1:-1, 3 : columns + 3] = torch.randn(rows, columns)
        return around[1:-1, 3 : columns + 3]

    torch.manual_seed(m + n + k)
    return operand(m, k, a_transposed), operand(k, n, b_transposed)


def check(c: Tensor, a: Tensor, b: Tensor, onto: Tensor | None = None) -> None:
    expected = a.double() @ b.double()
    scale = (a.double().abs() @ b.double().abs()).max().item()
    assert_close(c, expected if onto is None else expected + onto, "c", scale=scale)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 70) | st.integers(300, 700),  # more than 320 are cut into blocks
    *[st.booleans()] * 4,
)
def test_any_product(library, m, n, k, a_transposed, b_transposed, accumulate, rounded) -> None:
    a, b = operands(m, n, k, a_transposed, b_transposed)
    if rounded:
        check(multiply(library, a, b, rounded=True), a, b)
    else:
        onto = torch.randn(m, n) if accumulate else None
        check(multiply(library, a, b, onto=onto), a, b, onto)


def test_gathered_rows(library: ctypes.CDLL) -> None:
    a, b = operands(40, 20, 50, False, True)
    index = torch.randint(0, 40, (33,))
    check(multiply(library, a, b, index=index), a[index], b)


def test_no_depth(library: ctypes.CDLL) -> None:
    a, b = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(0, 5, dtype=torch.bfloat16)
    assert torch.equal(multiply(library, a, b), torch.zeros(3, 5))


def test_several_blocks(library: ctypes.CDLL) -> None:
    """More rows and columns than are packed at a time; and a part comes out as it does within the whole."""
    a, b = operands(1100, 300, 350, True, False)
    whole = multiply(library, a, b)
    check(whole, a, b)
    for rows, columns in ((slice(1090, 1100), slice(0, 1)), (slice(15, 18), slice(7, 60)), (slice(0, 1100), slice(1))):
        assert torch.equal(multiply(library, a[rows], b[:, columns]), whole[rows, columns])


def test_not_a_number_stays_in_its_row_and_column(library: ctypes.CDLL) -> None:
    a, b = operands(20, 20, 20, False, False)
    a[4, 19], b[19, 7] = torch.inf, torch.nan
    finite = multiply(library, a, b).isfinite()
    expected = torch.ones(20, 20, dtype=torch.bool)
    expected[4], expected[:, 7] = False, False
    assert torch.equal(finite, expected)
