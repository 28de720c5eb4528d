// Brings the operands of a matrix product into the order in which gemm_tile.h reads them.
#pragma once

#include <algorithm>

#include "gemm_tile.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// One operand: what is stored, rows of neighbouring elements, or its transpose.
template <class T>
struct Matrix {
  const T* data;
  int64_t stride;                      // from one stored row to the next, in elements
  bool transposed = false;             // the operand's rows are the stored columns
  const int64_t* row_index = nullptr;  // gather: the stored row r is the row row_index[r] of data

  const T* stored_row(int64_t r) const { return data + (row_index == nullptr ? r : row_index[r]) * stride; }

  Matrix transpose() const { return {data, stride, !transposed, row_index}; }

  // The operand from this row and column on.
  Matrix from(int64_t row, int64_t column) const {
    if (data == nullptr) return *this;  // of an empty tensor
    const int64_t stored_row = transposed ? column : row, stored_column = transposed ? row : column;
    if (row_index != nullptr) return {data + stored_column, stride, transposed, row_index + stored_row};
    return {data + stored_row * stride + stored_column, stride, transposed, nullptr};
  }
};

// ---- Loading units.

// The units that lie along `p`, the first `depth` elements of them, zeros beyond.
template <class T>
Vec load_units(const T* p, int64_t depth) {
#if defined(__AVX512BF16__)
  if constexpr (kDepthPerUnit<T> == 2) {
    if (depth >= 2 * kLanes) return (Vec)_mm512_loadu_si512(p);
    return (Vec)_mm512_maskz_loadu_epi16((1u << depth) - 1, p);
  }
#endif
  return depth >= kLanes ? load(p, AllLanes{}) : load(p, FirstLanes{depth});
}

// The units of neighbouring rows: each lane one of its own strip. `second` is the next row along the depth, or nullptr
// after the last one; it is read only for units of two elements.
template <class T, class Lanes>
Vec load_across(const T* first, [[maybe_unused]] const T* second, Lanes lanes) {
#if defined(__AVX512BF16__)
  if constexpr (kDepthPerUnit<T> == 2) {
    // A bfloat16 is the upper half of the float of the same value.
    const Bits32 lower = (Bits32)load(first, lanes) >> 16;
    return (Vec)(second == nullptr ? lower : lower | (Bits32)load(second, lanes));
  }
#endif
  return load(first, lanes);
}

// ---- Interleaving.

template <int... lane>
Vec interleave_lower(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane / 2 + lane % 2 * kLanes)...);
}

template <int... lane>
Vec interleave_upper(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (kLanes / 2 + lane / 2 + lane % 2 * kLanes)...);
}

// Reorders the lanes of `count` vectors, read one vector after the other: lane 0 of each, then lane 1 of each, ...
template <int count>
void interleave(Vec (&v)[count]) {
  static_assert((count & (count - 1)) == 0);
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int round = 1; round < count; round *= 2) {
    Vec zipped[count];
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i) {
      zipped[2 * i] = interleave_lower(v[i], v[i + count / 2], lanes);
      zipped[2 * i + 1] = interleave_upper(v[i], v[i + count / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) v[i] = zipped[i];
  }
}

// ---- Packing.

template <class T>
constexpr int64_t units_of(int64_t depth) {
  return (depth + kDepthPerUnit<T> - 1) / kDepthPerUnit<T>;
}

// Strips are rows of A or columns of B, in panels of `width`: [panels, units, width]. A panel's size is not a power of
// two, so that the panels do not compete for the same sets of the cache.
constexpr int64_t panel_size(int64_t units, int width) { return units * width + kLanes; }

// Stored rows are strips: their units lie along the rows.
template <class T, int width>
void pack_along(const Matrix<T>& stored, int64_t strips, int64_t depth, float* packed) {
  constexpr int kGroup = std::min(width, kLanes);
  const int64_t size = panel_size(units_of<T>(depth), width);
  for (int64_t first = 0; first < strips; first += kGroup) {
    const T* rows[kGroup];
    const int64_t count = std::min<int64_t>(kGroup, strips - first);
    for (int64_t r = 0; r < count; ++r) rows[r] = stored.stored_row(first + r);
    float* to = packed + first / width * size + first % width;
    for (int64_t d = 0; d < depth; d += kLanes * kDepthPerUnit<T>) {
      Vec v[kGroup];
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; ++r) v[r] = r < count ? load_units(rows[r] + d, depth - d) : Vec{};
      interleave(v);
      const int64_t units = std::min<int64_t>(kLanes, units_of<T>(depth - d));
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; ++i)
        if (i * kLanes / kGroup < units) store(to + i * kLanes / kGroup * width, v[i], AllLanes{});
      to += kLanes * width;
    }
  }
}

// Two vectors become one of their lower halves and one of their upper halves.
template <int... lane>
void exchange_halves(Vec& a, Vec& b, std::integer_sequence<int, lane...>) {
  constexpr int kHalf = kLanes / 2;
  const Vec lower = __builtin_shufflevector(a, b, (lane < kHalf ? lane : lane + kHalf)...);
  b = __builtin_shufflevector(a, b, (lane < kHalf ? lane + kHalf : lane + kLanes)...);
  a = lower;
}

// Stored rows run across the strips: each holds one element of every strip. Where a vector of them reaches two panels,
// two units are packed at a time, so that each panel gets a whole vector.
template <class T, int width>
void pack_across(const Matrix<T>& stored, int64_t strips, int64_t depth, float* packed) {
  constexpr int kUnits = std::max(1, kLanes / width);
  static_assert(kUnits <= 2);
  const int64_t size = panel_size(units_of<T>(depth), width);
  const auto stored_row = [&](int64_t d) { return d < depth ? stored.stored_row(d) : nullptr; };
  for (int64_t d = 0; d < depth; d += kUnits * kDepthPerUnit<T>, packed += kUnits * width) {
    const T *first[kUnits], *second[kUnits];
    for (int u = 0; u < kUnits; ++u) {
      first[u] = stored_row(d + u * kDepthPerUnit<T>);
      second[u] = stored_row(d + u * kDepthPerUnit<T> + 1);
    }
    for_each_vector(strips, [&](int64_t s, auto lanes) {
      Vec v[kUnits];
      for (int u = 0; u < kUnits; ++u)
        v[u] = first[u] == nullptr ? Vec{}
                                   : load_across(first[u] + s, second[u] == nullptr ? nullptr : second[u] + s, lanes);
      if constexpr (kUnits == 2) exchange_halves(v[0], v[1], std::make_integer_sequence<int, kLanes>{});
      float* to = packed + s / width * size + s % width;
      for (int u = 0; u < kUnits; ++u)
        if (s + u * width < strips) store(to + u * size, v[u], AllLanes{});
    });
  }
}

// The panels of A [strips, depth].
template <class T, int width>
void pack(const Matrix<T>& a, int64_t strips, int64_t depth, float* packed) {
  if (a.transposed)
    pack_across<T, width>(a, strips, depth, packed);
  else
    pack_along<T, width>(a, strips, depth, packed);
}

// Asks memory for one of `parts` of what pack<T, width>(a, strips, depth) will read.
template <class T>
void prefetch(const Matrix<T>& a, int64_t strips, int64_t depth, int64_t part, int64_t parts) {
  constexpr int64_t kLine = 64;
  const int64_t rows = a.transposed ? depth : strips, bytes = (a.transposed ? strips : depth) * sizeof(T);
  for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
    const char* row = reinterpret_cast<const char*>(a.stored_row(r));
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
    __builtin_prefetch(row + bytes - 1, 0, 2);  // rows need not begin with a line
  }
  asm volatile("");  // GCC drops calls of a function that does nothing but this
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
