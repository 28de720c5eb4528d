// Products with a packed B for kernels that pack, and keep, their operands themselves.
//
// A packed matrix is panels of `width` rows or columns, each panel_size(units, width) long.
#pragma once

#include "gemm_pack.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t round_down(int64_t value, int64_t unit) { return value / unit * unit; }

constexpr int64_t packed_size(int64_t strips, int64_t units, int width) {
  return round_up(strips, width) / width * panel_size(units, width);
}

// The left operand of a product: row r's unit u is data[r * row_stride + u * unit_stride].
struct LeftOperand {
  const float* data;
  int64_t row_stride, unit_stride;
};

// A tile of `vectors` vectors of columns; finish(row, vector, sum) takes each of the sums.
template <class T, int vectors = kTileVectors, class Finish>
void multiply(int64_t count, int64_t units, LeftOperand a, const float* b, Finish&& finish) {
  if constexpr (vectors > 1)
    if (count < vectors) return multiply<T, vectors - 1>(count, units, a, b, finish);
  Vec sum[kTileRows][vectors] = {};
  multiply_units<T>(units, a.data, a.row_stride, a.unit_stride, b, sum);
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) finish(r, v, sum[r][v]);
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
