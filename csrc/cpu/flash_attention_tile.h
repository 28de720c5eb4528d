// What the flash attention kernels share: tiles of scores, their products, and the memory that they live in.
//
// Scores are computed for a block of queries and a block of keys at a time. Only the part of it that the mask leaves
// is: each strip of kTileRows queries has its own range of keys.
#pragma once

#include <algorithm>

#include "common/float_buffer.h"
#include "common/gemm_panels.h"
#include "common/vec_math.h"
#include "flash_attention.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// ---- Operands.

// What units are made of.
template <class T>
using Packed = std::conditional_t<kDepthPerUnit<T> == 2, T, float>;

#if defined(__AVX512BF16__)
template <int... lane>
Vec interleave_halves(__m512i halves, std::integer_sequence<int, lane...>) {
  const VectorOf<int16_t, 2 * kLanes>::type source = {static_cast<int16_t>(lane / 2 + lane % 2 * kLanes)...};
  return (Vec)_mm512_permutexvar_epi16((__m512i)source, halves);
}
#endif

// Rows [count, dim] one after the other, each of round_up(units, kLanes) units; zeros beyond dim.
template <class T>
void copy_rows(const Matrix<T>& rows, int64_t count, int64_t dim, float* to) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t d = 0; d < dim; d += kLanes * kDepthPerUnit<T>, to += kLanes)
      store(to, load_units(rows.stored_row(r) + d, dim - d), AllLanes{});
}

// The units of two rows, for a product along which they are neighbours. `to` is where the first row's units go.
template <class T>
void store_row_pair(float* to, Vec first, Vec second) {
  if constexpr (kDepthPerUnit<T> == 2) {
#if defined(__AVX512BF16__)
    const auto halves = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    store(to, interleave_halves((__m512i)halves, std::make_integer_sequence<int, 2 * kLanes>{}), AllLanes{});
#endif
  } else {
    store(to, first, AllLanes{});
    store(to + kLanes, second, AllLanes{});
  }
}

// kTileRows rows of a product: which part of it to compute.
struct Strip {
  LeftOperand a;
  IndexRange units, columns;
};

// Products of strips with a packed B of `columns` columns. strip(i) describes the strip i, target(i, row) is where its
// row of C begins, and finish(target, i, row, column, sum) takes the kLanes sums from that column on. Panels of B in
// the outer loop: each stays in the first-level cache.
template <class T, class DescribeStrip, class Target, class Finish>
void multiply_strips(int64_t strips, const float* b, int64_t panel, int64_t columns, DescribeStrip&& strip,
                     Target&& target, Finish&& finish) {
  for (int64_t first = 0; first < columns; first += kTileColumns, b += panel) {
    for (int64_t i = 0; i < strips; ++i) {
      const Strip part = strip(i);
      const int64_t begin = std::max(first, round_down(part.columns.begin, kLanes));
      const int64_t end = std::min(first + kTileColumns, part.columns.end);
      if (begin >= end) continue;
      const LeftOperand a = {part.a.data + part.units.begin * part.a.unit_stride, part.a.row_stride,
                             part.a.unit_stride};
      for (int r = 0; r < kTileRows; ++r)
        for (int64_t column = begin; column < end; column += kLanes) __builtin_prefetch(target(i, r) + column, 1);
      multiply<T>((end - begin + kLanes - 1) / kLanes, part.units.end - part.units.begin, a,
                  b + part.units.begin * kTileColumns + begin - first,
                  [&](int r, int v, Vec sum) { finish(target(i, r), i, r, begin + v * kLanes, sum); });
    }
  }
}

// ---- Scores.

// The units that hold the elements of a range.
template <class T>
IndexRange units_around(IndexRange elements) {
  return {elements.begin / kDepthPerUnit<T>, units_of<T>(elements.end)};
}

// Which keys of a block each strip of a block of queries sees: all that any of its queries does.
struct StripKeys {
  static constexpr int64_t kMaxStrips = 64;

  int64_t strips;
  IndexRange keys[kMaxStrips];  // relative to the block
};

inline IndexRange visible_in_block(const AttentionProblem& problem, const AttentionSequence& sequence, int64_t query,
                                   IndexRange block) {
  const IndexRange keys = clip(visible_keys(problem, sequence, query), block.begin, block.end);
  return {keys.begin - block.begin, keys.end - block.begin};
}

inline StripKeys strip_keys(const AttentionProblem& problem, const AttentionSequence& sequence, IndexRange queries,
                            IndexRange block) {
  StripKeys strips = {round_up(queries.end - queries.begin, kTileRows) / kTileRows, {}};
  for (int64_t i = 0; i < strips.strips; ++i) {
    const int64_t first = queries.begin + i * kTileRows, last = std::min(first + kTileRows, queries.end) - 1;
    strips.keys[i] = {visible_in_block(problem, sequence, first, block).begin,
                      visible_in_block(problem, sequence, last, block).end};
  }
  return strips;
}

// How scores become exponents of 2: either by a factor or, where that is not enough, in place and then by log2(e).
struct Exponents {
  float factor, scale, softcap;
  bool in_place;

  explicit Exponents(const AttentionProblem& problem)
      : scale(problem.scale), softcap(problem.softcap), in_place(softcap != 0.0f || !(scale > 0.0f)) {
    factor = in_place ? kLog2E : scale * kLog2E;
  }
};

// The scores of one query, from products q · k in [begin, end), whole vectors. Those outside `visible` become -inf.
inline void finish_scores(const Exponents& exponents, float* scores, int64_t begin, int64_t end, IndexRange visible) {
  if (exponents.in_place)
    for (int64_t j = begin; j < end; j += kLanes) {
      Vec score = load(scores + j, AllLanes{}) * exponents.scale;
      if (exponents.softcap != 0.0f) score = exponents.softcap * tanh(score / exponents.softcap);
      store(scores + j, score, AllLanes{});
    }
  constexpr float kMasked = -__builtin_inff();
  for (int64_t j = begin; j < std::min(visible.begin, end); ++j) scores[j] = kMasked;
  for (int64_t j = std::max(visible.end, begin); j < end; ++j) scores[j] = kMasked;
}

// Rows of half precision or float out of q, k, v and the like.
template <class T>
Matrix<T> rows_of(const AttentionInput& input, int64_t batch, int64_t token, int64_t head) {
  const AttentionStrides& strides = input.strides;
  const T* data = static_cast<const T*>(input.data);
  return {data + batch * strides.batch + token * strides.token + head * strides.head, strides.token};
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
