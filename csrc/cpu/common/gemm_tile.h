// The innermost part of a matrix product: a tile of C that stays in registers while the depth runs through.
//
// Operands arrive packed: of A, the kTileRows elements that one step needs lie next to each other, then those of the
// next step; of B, kTileColumns. A step takes one `unit` of each row and column. A unit has 32 bits: a float, or two
// bfloat16 neighbours along the depth where an instruction multiplies and adds both.
#pragma once

#include "vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileVectors = 3;  // 24 sums, 3 vectors of B and 1 of A in 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileVectors = 3;  // 12 sums, 3 of B and 1 of A in 16 registers
#else
constexpr int kTileRows = 4, kTileVectors = 2;  // without FMA a product needs a register too
#endif
constexpr int kTileColumns = kTileVectors * kLanes;

#if defined(__AVX512BF16__)
template <class T>
constexpr int kDepthPerUnit = std::is_same_v<T, bfloat16> ? 2 : 1;
#else
template <class T>
constexpr int kDepthPerUnit = 1;
#endif

// sum + a · b, of units in the lanes of a and b.
template <class T>
Vec multiply_add(Vec sum, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  if constexpr (kDepthPerUnit<T> == 2) return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return sum + a * b;
}

// Sums over `units` steps of a tile's products. Row r's unit u is a[r * row_stride + u * unit_stride]; b is packed.
// Always inlined: only sums that nobody else can see stay in registers.
template <class T, int vectors>
__attribute__((always_inline)) inline void multiply_units(int64_t units, const float* a, int64_t row_stride,
                                                          int64_t unit_stride, const float* b,
                                                          Vec (&sum)[kTileRows][vectors]) {
  for (int64_t u = 0; u < units; ++u, a += unit_stride, b += kTileColumns) {
    Vec column[vectors];
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) column[v] = load(b + v * kLanes, AllLanes{});
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
      const Vec row = broadcast(a[r * row_stride]);
#pragma GCC unroll 3
      for (int v = 0; v < vectors; ++v) sum[r][v] = multiply_add<T>(sum[r][v], row, column[v]);
    }
  }
}

// The top left rows x columns of a tile; `columns` lie in the first `vectors` vectors.
// C [rows, columns] (+)= A [kTileRows, units] · B [units, kTileColumns], C's rows `stride` apart.
template <class T, int vectors, class C>
void multiply_tile(int64_t units, const float* a, const float* b, C* c, int64_t stride, int64_t rows, int64_t columns,
                   bool accumulate) {
  Vec sum[kTileRows][vectors] = {};
  multiply_units<T>(units, a, 1, kTileRows, b, sum);

  const auto finish = [accumulate](C* p, Vec value, auto lanes) {
    store(p, accumulate ? load(p, lanes) + value : value, lanes);
  };
  const int64_t last = columns - (vectors - 1) * kLanes;  // columns in the last vector
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
    if (r >= rows) break;
    C* row = c + r * stride;
#pragma GCC unroll 3
    for (int v = 0; v < vectors - 1; ++v) finish(row + v * kLanes, sum[r][v], AllLanes{});
    C* end = row + (vectors - 1) * kLanes;
    last == kLanes ? finish(end, sum[r][vectors - 1], AllLanes{}) : finish(end, sum[r][vectors - 1], FirstLanes{last});
  }
}

// The same for any columns in [1, kTileColumns].
template <class T, int vectors = kTileVectors, class C>
void multiply_partial_tile(int64_t units, const float* a, const float* b, C* c, int64_t stride, int64_t rows,
                           int64_t columns, bool accumulate) {
  if constexpr (vectors > 1)
    if (columns <= (vectors - 1) * kLanes)
      return multiply_partial_tile<T, vectors - 1>(units, a, b, c, stride, rows, columns, accumulate);
  multiply_tile<T, vectors>(units, a, b, c, stride, rows, columns, accumulate);
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
