// Products and triangular systems of one chunk, as the gated delta rule's kernels put them together.
#pragma once

#include <algorithm>

#include "common/gemm_panels.h"
#include "gated_delta_rule.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr int64_t kChunk = DeltaRule::kChunk;
constexpr int64_t kChunkStride = kChunk + kLanes;  // between rows of [chunk, chunk]

// Rows are some vectors more than `length` apart, so that they do not compete for the same sets of the cache.
constexpr int64_t row_stride(int64_t length) { return round_up(length, kLanes) + kLanes; }

// The part of the depth that matters to a tile of rows.
struct Units {
  int64_t begin, end;
};

// C [rows, columns] = A · B; B packed in panels `panel` apart. finish(row, column, sum) takes kLanes sums.
template <class Depth, class Finish>
void product(int64_t rows, int64_t columns, LeftOperand a, const float* b, int64_t panel, Depth&& depth,
             Finish&& finish) {
  for (int64_t j = 0; j < columns; j += kTileColumns, b += panel)
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const Units units = depth(i);
      const LeftOperand part = {a.data + i * a.row_stride + units.begin * a.unit_stride, a.row_stride, a.unit_stride};
      multiply<float>((columns - j + kLanes - 1) / kLanes, units.end - units.begin, part,
                      b + units.begin * kTileColumns,
                      [&](int r, int v, Vec sum) { finish(i + r, j + v * kLanes, sum); });
    }
}

// A full left operand; lower triangular with its diagonal; upper triangular.
inline auto full(int64_t depth) {
  return [depth](int64_t) { return Units{0, depth}; };
}
inline auto lower(int64_t depth) {
  return [depth](int64_t row) { return Units{0, std::min(row + kTileRows, depth)}; };
}
inline auto upper(int64_t depth) {
  return [depth](int64_t row) { return Units{row, depth}; };
}

// Rows [depth, columns] as the B of a product, and as Bᵀ.
inline void pack_rows(const float* rows, int64_t stride, int64_t depth, int64_t columns, float* packed) {
  pack<float, kTileColumns>(Matrix<float>{rows, stride}.transpose(), columns, depth, packed);
}
inline void pack_columns(const float* rows, int64_t stride, int64_t columns, int64_t depth, float* packed) {
  pack<float, kTileColumns>(Matrix<float>{rows, stride}, columns, depth, packed);
}

// x <- (1 + L)⁻¹ x for strictly lower triangular L [n, n], in `count` vectors of columns. `panel`, of n units, is used.
template <int vectors = kTileVectors>
void solve_panel(int64_t count, int64_t n, LeftOperand l, float* x, int64_t stride, float* panel) {
  if constexpr (vectors > 1)
    if (count < vectors) return solve_panel<vectors - 1>(count, n, l, x, stride, panel);
  for (int64_t i = 0; i < n; i += kTileRows) {
    const float* rows = l.data + i * l.row_stride;
    Vec sum[kTileRows][vectors] = {};
    multiply_units<float>(i, rows, l.row_stride, l.unit_stride, panel, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 3
      for (int v = 0; v < vectors; ++v) {
        Vec value = load(x + (i + r) * stride + v * kLanes, AllLanes{}) - sum[r][v];
#pragma GCC unroll 8
        for (int s = 0; s < r; ++s) value -= sum[s][v] * rows[r * l.row_stride + (i + s) * l.unit_stride];
        sum[r][v] = value;
        store(x + (i + r) * stride + v * kLanes, value, AllLanes{});
        store(panel + (i + r) * kTileColumns + v * kLanes, value, AllLanes{});
      }
  }
}

inline void solve(int64_t n, int64_t columns, LeftOperand l, float* x, int64_t stride, float* panel) {
  for (int64_t j = 0; j < columns; j += kTileColumns)
    solve_panel((columns - j + kLanes - 1) / kLanes, n, l, x + j, stride, panel);
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
