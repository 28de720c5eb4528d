// What the flash attention kernels share: tiles of scores, their products, and the memory that they live in.
//
// Scores are computed for a block of queries and a block of keys at a time. Only the part of it that the mask leaves
// is: each strip of a few queries has its own range of keys.
#pragma once

#include <algorithm>
#include <utility>

#include "common/float_buffer.h"
#include "common/gemm_panels.h"
#include "common/vec_math.h"
#include "flash_attention.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// How products are cut: strips of so many rows, and keys in groups of so many. flash_attention_amx.h has its own
// answers to these, and to what follows in terms of T, for bfloat16 where tiles multiply it.
template <class T>
constexpr int kStripRows = kTileRows;
template <class T>
constexpr int kKeyGroup = kLanes;

// What a kernel that multiplies holds while it runs.
template <class T>
struct ProductState {};

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

// Rows [count, dim] one after the other, each of round_up(units, kLanes) units; zeros beyond dim, and in the rows that
// fill up the last strip: their products meet zeros, which NaN would survive.
template <class T>
void copy_rows(const Matrix<T>& rows, int64_t count, int64_t dim, float* to) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t d = 0; d < dim; d += kLanes * kDepthPerUnit<T>, to += kLanes)
      store(to, load_units(rows.stored_row(r) + d, dim - d), AllLanes{});
  const int64_t padding = round_up(count, kStripRows<T>) - count, stride = round_up(units_of<T>(dim), kLanes);
  __builtin_memset(to, 0, padding * stride * sizeof(float));
}

// The units of two rows that are neighbours along the depth of a product.
template <class T>
struct RowPair {
  Vec first, second;  // as float

  // As one operand's units, the first row's at `to`.
  void store_across(float* to) const {
    if constexpr (kDepthPerUnit<T> == 2) {
#if defined(__AVX512BF16__)
      store(to, interleave_halves(halves(), std::make_integer_sequence<int, 2 * kLanes>{}), AllLanes{});
#endif
    } else {
      store(to, first, AllLanes{});
      store(to + kLanes, second, AllLanes{});
    }
  }

  // As elements along two rows.
  void store_along(Packed<T>* to_first, Packed<T>* to_second) const {
    if constexpr (kDepthPerUnit<T> == 2) {
#if defined(__AVX512BF16__)
      const __m512i both = halves();
      const __m256i lower = __builtin_shufflevector(both, both, 0, 1, 2, 3);
      const __m256i upper = __builtin_shufflevector(both, both, 4, 5, 6, 7);
      __builtin_memcpy(to_first, &lower, sizeof lower);
      __builtin_memcpy(to_second, &upper, sizeof upper);
#endif
    } else {
      store(to_first, first, AllLanes{});
      store(to_second, second, AllLanes{});
    }
  }

#if defined(__AVX512BF16__)
  __m512i halves() const { return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
#endif
};

// The left operand of a strip's products.
template <class T>
struct StripOperand : LeftOperand {
  // Rows of units, `stride` floats apart.
  static StripOperand of_rows(const float* rows, int64_t stride) { return {{rows, stride, 1}}; }

  // From `row` on, rows that were stored across: kLanes of them together, [units, kLanes], each time `group` floats.
  static StripOperand of_groups(const float* groups, int64_t group, int64_t row) {
    return {{groups + row / kLanes * group + row % kLanes, 1, kLanes}};
  }

  // Of some of those rows, a strip's units have been stored from `unit` on.
  static void finish_units(float* /*groups*/, int64_t /*group*/, IndexRange /*rows*/, int64_t /*unit*/) {}
};

// ---- Products.

// Calls body with `vectors`, in [1, kTileVectors], as a constant.
template <int most = kTileVectors, class Body>
void with_vectors(int64_t vectors, Body&& body) {
  if constexpr (most > 1)
    if (vectors < most) return with_vectors<most - 1>(vectors, body);
  body(std::integral_constant<int, most>{});
}

// The right operand of a product [units, columns], in panels of a few vectors of columns, all about alike.
template <class T>
class RightOperand {
 public:
  static constexpr int kMostColumns = kTileColumns;  // in a panel

  RightOperand() = default;
  RightOperand(int64_t columns, int64_t most_units, Carver& memory) : columns_(columns) {
    constexpr int64_t kPanelFloats = (24 << 10) / sizeof(float);  // most of a first-level cache of 32 KB
    const int64_t vectors = std::max<int64_t>(1, round_up(columns, kLanes) / kLanes);
    const int64_t most = std::clamp<int64_t>(kPanelFloats / std::max<int64_t>(1, most_units * kLanes), 2, kTileVectors);
    const int64_t panels = (vectors + most - 1) / most;
    width_ = (vectors + panels - 1) / panels * kLanes;
    data_ = memory.take(round_up(std::max<int64_t>(1, columns), width_) / width_ * panel_size(most_units, width_));
  }

  // Rows of `b` are columns, or are the depth if it is transposed.
  void pack_from(const Matrix<T>& b, int64_t columns, int64_t depth) {
    units_ = units_of<T>(depth);
    with_vectors(width_ / kLanes, [&](auto vectors) { pack<T, vectors * kLanes>(b, columns, depth, data_); });
  }

  int64_t columns() const { return columns_; }
  int64_t width() const { return width_; }
  const float* panel(int64_t first_column) const { return data_ + first_column / width_ * panel_size(units_, width_); }

 private:
  int64_t columns_, width_, units_ = 0;
  float* data_;
};

// Sums over `units` steps of kTileRows rows of A with vectors of a panel, which is `width` columns wide.
template <class T, int vectors>
void multiply_panel(int64_t units, LeftOperand a, const float* b, int64_t width, Vec (&sum)[kTileRows][vectors]) {
  for (int64_t u = 0; u < units; ++u, a.data += a.unit_stride, b += width) {
    Vec column[vectors];
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) column[v] = load(b + v * kLanes, AllLanes{});
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
      const Vec row = broadcast(a.data[r * a.row_stride]);
#pragma GCC unroll 3
      for (int v = 0; v < vectors; ++v) sum[r][v] = multiply_add<T>(sum[r][v], row, column[v]);
    }
  }
}

// The sums of a tile go to rows `stride` apart.
template <int vectors>
void store_tile(const Vec (&sum)[kTileRows][vectors], float* to, int64_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) store(to + r * stride + v * kLanes, sum[r][v], AllLanes{});
}

// Products of kTileRows rows with columns of one panel, whole vectors; the rows of products are `stride` apart.
template <class T>
void multiply_strip(int64_t units, LeftOperand a, const RightOperand<T>& b, IndexRange columns, float* products,
                    int64_t stride) {
  const float* panel = b.panel(columns.begin) + columns.begin % b.width();
  with_vectors((columns.end - columns.begin) / kLanes, [&](auto vectors) {
    Vec sum[kTileRows][vectors] = {};
    multiply_panel<T>(units, a, panel, b.width(), sum);
    store_tile(sum, products, stride);
  });
}

// A strip's rows of a product, or the `rows` of them that exist: which part of the depth they need.
template <class T>
struct Strip {
  StripOperand<T> a;
  IndexRange units;
  int64_t rows;
};

// Combines the sums of a tile with its top left rows x columns: combine(row, before, sum).
template <int vectors, class Combine>
void combine_tile(const Vec (&sum)[kTileRows][vectors], float* to, int64_t stride, int64_t rows, int64_t columns,
                  Combine combine) {
  const int64_t last = columns - (vectors - 1) * kLanes;  // columns in the last vector
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r, to += stride) {
    if (r >= rows) return;
#pragma GCC unroll 3
    for (int v = 0; v < vectors; ++v) {
      float* p = to + v * kLanes;
      const auto update = [&](auto lanes) { store(p, combine(r, load(p, lanes), sum[r][v]), lanes); };
      v < vectors - 1 || last == kLanes ? update(AllLanes{}) : update(FirstLanes{last});
    }
  }
}

// C = combine(row, C, A · B), strip by strip. Panels of B in the outer loop: each stays in the first-level cache. C's
// rows are `stride` apart; strip(i) describes its strip i. What `combine` needs it holds itself, not by reference: C
// may be anything, and so may what a reference leads to, which then is read again for each vector.
template <class T, class DescribeStrip, class Combine>
void combine_product(int64_t strips, const RightOperand<T>& b, float* c, int64_t stride, DescribeStrip&& strip,
                     Combine combine) {
  for (int64_t first = 0; first < b.columns(); first += b.width()) {
    const int64_t columns = std::min(b.width(), b.columns() - first);
    const float* panel = b.panel(first);
    with_vectors((columns + kLanes - 1) / kLanes, [&](auto vectors) {
      for (int64_t i = 0; i < strips; ++i) {
        const Strip<T> part = strip(i);
        if (part.units.begin >= part.units.end) continue;
        float* to = c + i * kTileRows * stride + first;
        for (int64_t r = 0; r < part.rows; ++r)
          for (int v = 0; v < vectors; ++v) __builtin_prefetch(to + r * stride + v * kLanes, 1);
        const LeftOperand a = {part.a.data + part.units.begin * part.a.unit_stride, part.a.row_stride,
                               part.a.unit_stride};
        Vec sum[kTileRows][vectors] = {};
        multiply_panel<T>(part.units.end - part.units.begin, a, panel + part.units.begin * b.width(), b.width(), sum);
        combine_tile(sum, to, stride, part.rows, columns,
                     [=](int r, Vec before, Vec v) { return combine(i * kTileRows + r, before, v); });
      }
    });
  }
}

// ---- Scores.

// The units that hold the elements of a range: none if there are none, though two elements may share a unit.
template <class T>
IndexRange units_around(IndexRange elements) {
  if (elements.begin >= elements.end) return {0, 0};
  return {elements.begin / kDepthPerUnit<T>, units_of<T>(elements.end)};
}

// Which keys of a block each strip of a block of queries sees, relative to the block.
struct StripKeys {
  static constexpr int64_t kMaxStrips = 64;

  int64_t strips;
  IndexRange keys[kMaxStrips];    // those that any of its queries sees
  IndexRange shared[kMaxStrips];  // those that all of its queries see; if there are none, the end may come first
};

inline IndexRange visible_in_block(const AttentionProblem& problem, const AttentionSequence& sequence, int64_t query,
                                   IndexRange block) {
  const IndexRange keys = clip(visible_keys(problem, sequence, query), block.begin, block.end);
  return {keys.begin - block.begin, keys.end - block.begin};
}

template <int strip_rows>
inline StripKeys strip_keys(const AttentionProblem& problem, const AttentionSequence& sequence, IndexRange queries,
                            IndexRange block) {
  StripKeys strips = {round_up(queries.end - queries.begin, strip_rows) / strip_rows, {}, {}};
  for (int64_t i = 0; i < strips.strips; ++i) {
    const int64_t first = queries.begin + i * strip_rows, last = std::min(first + strip_rows, queries.end) - 1;
    const IndexRange of_first = visible_in_block(problem, sequence, first, block);
    const IndexRange of_last = visible_in_block(problem, sequence, last, block);
    strips.keys[i] = {of_first.begin, of_last.end};
    strips.shared[i] = {of_last.begin, of_first.end};
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

// The scores of a strip, `stride` apart, in the columns `begin` to `end` of a block of keys: whole vectors. `shared`
// are those that all of its queries see: if these are all columns, products may be enough.
template <int strip_rows>
inline void finish_strip(const AttentionProblem& problem, const AttentionSequence& sequence, const Exponents& exponents,
                         IndexRange queries, IndexRange block, IndexRange columns, IndexRange shared, float* scores,
                         int64_t stride) {
  if (!exponents.in_place && shared.begin <= columns.begin && columns.end <= shared.end) return;
  for (int r = 0; r < strip_rows; ++r) {
    const int64_t query = std::min(queries.begin + r, queries.end - 1);
    const IndexRange visible = visible_in_block(problem, sequence, query, block);
    finish_scores(exponents, scores + r * stride, 0, columns.end - columns.begin,
                  {visible.begin - columns.begin, visible.end - columns.begin});
  }
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
