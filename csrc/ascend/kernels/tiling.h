// How a matrix is cut into the tiles that its cores work on: decided on the host, used by the kernels.
#pragma once

#include <cstdint>

// Of functions that run on the host and in kernels.
#ifdef __aicore__
#define BOTH_SIDES __host__ __aicore__
#else
#define BOTH_SIDES
#endif

namespace mindspeed::ascend {

// Unified buffer that kernels plan with; the rest is left to the few bytes that depend on no tile.
constexpr int64_t kUnifiedBufferBudget = 184 << 10;

template <class T>
BOTH_SIDES constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class T>
BOTH_SIDES constexpr T larger(T a, T b) {
  return a > b ? a : b;
}

BOTH_SIDES constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
BOTH_SIDES constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Rows of local memory are padded to whole blocks of 32 bytes, at most this many elements.
constexpr int64_t kRowElements = 16;

// Rows of matrices that the cube cores read lie at most this many elements apart.
constexpr int64_t kMaxMatrixStride = 65535;

// Tiles of `rows` whole rows, or, where a row is too long, of `rows` parts of `columns` columns.
struct Tiles {
  int64_t matrix_rows, matrix_columns;
  int32_t rows, columns;

  BOTH_SIDES constexpr int64_t down() const { return ceil_div(matrix_rows, rows); }
  BOTH_SIDES constexpr int64_t across() const { return ceil_div(matrix_columns, columns); }
};

// The bytes of the unified buffer that a kernel needs for each element of a tile, row of it and column of it, and
// besides. Queues have two buffers, so that copies and computations overlap.
struct Footprint {
  int64_t queued;  // per element, in one buffer of each queue
  int64_t scratch, per_row = 0;
  int64_t per_column = 0;  // in one buffer; whole rows need no other: what all of them share is loaded once
  int64_t fixed = 0;

  int64_t bytes(int64_t rows, int64_t columns, bool whole) const {
    return rows * columns * (2 * queued + scratch) + rows * per_row + columns * per_column * (whole ? 1 : 2) + fixed;
  }
};

// The largest tiles that fit, but no fewer than there are cores if the matrix has the rows. Whole rows if one fits.
inline Tiles tile(int64_t rows, int64_t columns, const Footprint& footprint, int64_t cores) {
  constexpr int64_t kMaxRows = 128, kMaxColumns = 8192;
  const auto fits = [&](int64_t r, int64_t c) { return footprint.bytes(r, c, c >= columns) <= kUnifiedBufferBudget; };
  int64_t part = smaller(round_up(columns, kRowElements), kMaxColumns);
  while (!fits(1, part)) part = round_up(part / 2, kRowElements);
  int64_t height = 1;
  while (height < kMaxRows && 2 * height * cores <= rows && fits(2 * height, part)) height *= 2;
  return {rows, columns, int32_t(height), int32_t(part)};
}

}  // namespace mindspeed::ascend
