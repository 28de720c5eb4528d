// What the vector kernels share: conversions to and from float32, and products of rows with scalars.
#pragma once

#include <type_traits>

#include "kernel_operator.h"
#include "tiling.h"

namespace mindspeed::ascend {

using namespace AscendC;

constexpr int32_t kFloatsPerBlock = 8, kFloatsPerRepeat = 64;

template <class T>
__aicore__ inline GlobalTensor<T> GlobalOf(GM_ADDR address, uint64_t size) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address), size);
  return tensor;
}

// `to` = `from` in float32.
template <class T>
__aicore__ inline void Widen(const LocalTensor<float>& to, const LocalTensor<T>& from, int32_t count) {
  if constexpr (std::is_same_v<T, float>) {
    Muls(to, from, 1.0f, count);
  } else {
    Cast(to, from, RoundMode::CAST_NONE, count);
  }
}

// `to` = `from`, rounded to nearest even.
template <class T>
__aicore__ inline void Narrow(const LocalTensor<T>& to, const LocalTensor<float>& from, int32_t count) {
  if constexpr (std::is_same_v<T, float>) {
    Muls(to, from, 1.0f, count);
  } else {
    Cast(to, from, RoundMode::CAST_RINT, count);
  }
}

// Each of some numbers, a multiple of eight, fills a block.
__aicore__ inline void Broadcast(const LocalTensor<float>& blocks, const LocalTensor<float>& numbers, int32_t count) {
  Brcb(blocks, numbers, uint8_t(count / kFloatsPerBlock), {1, 8});
}

// row *= the number that fills the block `factor`, in place. Whole repeats of 64 columns, then the rest.
__aicore__ inline void ScaleRow(const LocalTensor<float>& row, const LocalTensor<float>& factor, int32_t columns) {
  const int32_t repeats = columns / kFloatsPerRepeat, rest = columns % kFloatsPerRepeat;
  if (repeats > 0) Mul(row, row, factor, uint64_t(kFloatsPerRepeat), uint8_t(repeats), {1, 1, 0, 8, 8, 0});
  if (rest > 0) {
    const LocalTensor<float> tail = row[repeats * kFloatsPerRepeat];
    Mul(tail, tail, factor, uint64_t(rest), uint8_t(1), {1, 1, 0, 8, 8, 0});
  }
}

// A tile of a matrix: which part it is, and how far apart its rows are in local memory: whole blocks, of `multiple`
// elements.
struct Tile {
  int64_t row, column;
  int32_t rows, columns, width;

  __aicore__ inline Tile(const Tiles& tiles, int64_t down, int64_t across, int32_t multiple) {
    row = down * tiles.rows;
    column = across * tiles.columns;
    rows = int32_t(smaller<int64_t>(tiles.rows, tiles.matrix_rows - row));
    columns = int32_t(smaller<int64_t>(tiles.columns, tiles.matrix_columns - column));
    width = int32_t(round_up(columns, multiple));
  }

  __aicore__ inline int32_t count() const { return rows * width; }
};

// Rows of a tile, `width` apart in local memory, `stride` apart in global memory.
template <class T>
__aicore__ inline void CopyRowsIn(const LocalTensor<T>& to, const GlobalTensor<T>& from, int32_t rows, int32_t columns,
                                  int32_t width, int64_t stride) {
  const int32_t gap = width - round_up(columns, 32 / sizeof(T));
  DataCopyPad(
      to, from,
      DataCopyExtParams(uint16_t(rows), uint32_t(columns * sizeof(T)),
                        uint32_t(rows > 1 ? (stride - columns) * sizeof(T) : 0), uint32_t(gap * sizeof(T) / 32), 0),
      DataCopyPadExtParams<T>(false, 0, 0, T()));
}

template <class T>
__aicore__ inline void CopyRowsOut(const GlobalTensor<T>& to, const LocalTensor<T>& from, int32_t rows, int32_t columns,
                                   int32_t width, int64_t stride) {
  const int32_t gap = width - round_up(columns, 32 / sizeof(T));
  DataCopyPad(to, from,
              DataCopyExtParams(uint16_t(rows), uint32_t(columns * sizeof(T)), uint32_t(gap * sizeof(T) / 32),
                                uint32_t(rows > 1 ? (stride - columns) * sizeof(T) : 0), 0));
}

}  // namespace mindspeed::ascend
