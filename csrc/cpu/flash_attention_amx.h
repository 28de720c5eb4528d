// Attention's products of bfloat16 with AMX, in place of those that flash_attention_tile.h has for vectors.
//
// All are made of 32 x 32 sums in four tiles (gemm_amx.h): the scores of 32 queries and 32 keys, or 32 rows and columns
// of the output or a gradient. Depths are whole steps of 32 elements; in what fills up the last one both operands are
// zeros.
#pragma once

#include "common/gemm_amx.h"
#include "flash_attention_tile.h"

#ifdef MINDSPEED_AMX

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

template <>
constexpr int kStripRows<bfloat16> = AmxProduct::kRowUnit;
template <>
constexpr int kKeyGroup<bfloat16> = AmxProduct::kColumnUnit;  // which is a step of the depth as well

template <>
struct ProductState<bfloat16> {
  AmxProduct tiles;
};

template <>
struct StripOperand<bfloat16> : AmxRows {
  static StripOperand of_rows(const float* rows, int64_t stride) {
    return {{rows, stride, AmxProduct::kPairs, AmxProduct::kStrips * stride}};
  }

  // kLanes rows together are a tile for each step.
  static StripOperand of_groups(const float* groups, int64_t group, int64_t row) {
    return {{groups + row / kLanes * group, AmxProduct::kPairs, AmxProduct::kTileSize, group}};
  }

  // What was stored with a row for each unit becomes tiles with a row for each row.
  static void finish_units(float* groups, int64_t group, IndexRange rows, int64_t unit) {
    float* first = groups + rows.begin / kLanes * group + unit * kLanes;
    AmxProduct::transpose_tiles((rows.end - rows.begin) / kLanes, first, group);
  }
};

// Panels of two tiles' columns.
template <>
class RightOperand<bfloat16> {
 public:
  static constexpr int kMostColumns = AmxProduct::kColumnUnit;

  RightOperand() = default;
  RightOperand(int64_t columns, int64_t most_units, Carver& memory) : columns_(columns) {
    const int64_t tiles = round_up(columns, kMostColumns) / AmxProduct::kStrips;
    data_ = memory.take(tiles * AmxProduct::panel_of(most_units * kDepthPerUnit<bfloat16>));
  }

  // Columns that fill up the last panel are zeros.
  void pack_from(const Matrix<bfloat16>& b, int64_t columns, int64_t depth) {
    distance_ = AmxProduct::panel_of(depth);
    steps_ = AmxProduct::steps_of(depth);
    AmxProduct::pack_b(b.transpose(), columns, depth, data_);
    const int64_t packed = round_up(columns, AmxProduct::kStrips) / AmxProduct::kStrips;
    if (packed % 2 == 1) __builtin_memset(data_ + packed * distance_, 0, distance_ * sizeof(float));
  }

  int64_t columns() const { return columns_; }
  int64_t width() const { return kMostColumns; }
  int64_t steps() const { return steps_; }
  int64_t distance() const { return distance_; }  // of the two tiles' columns, in floats
  const float* panel(int64_t first_column) const { return data_ + first_column / AmxProduct::kStrips * distance_; }

 private:
  int64_t columns_, steps_ = 0, distance_ = 0;
  float* data_;
};

// The columns are all of a panel's.
inline void multiply_strip(int64_t /*units*/, const StripOperand<bfloat16>& a, const RightOperand<bfloat16>& b,
                           IndexRange columns, float* products, int64_t stride) {
  AmxProduct::multiply_tiles(true, true, b.steps(), a, b.panel(columns.begin), b.distance(), products, stride);
}

template <class DescribeStrip, class Combine>
void combine_product(int64_t strips, const RightOperand<bfloat16>& b, float* c, int64_t stride, DescribeStrip&& strip,
                     Combine combine) {
  constexpr int64_t kRows = kStripRows<bfloat16>, kColumns = RightOperand<bfloat16>::kMostColumns;
  for (int64_t first = 0; first < b.columns(); first += kColumns) {
    const int64_t columns = std::min(kColumns, b.columns() - first);
    for (int64_t i = 0; i < strips; ++i) {
      const Strip<bfloat16> part = strip(i);
      if (part.units.begin >= part.units.end) continue;
      float* to = c + i * kRows * stride + first;
      for (int64_t r = 0; r < part.rows; ++r)
        for (int64_t j = 0; j < columns; j += kLanes) __builtin_prefetch(to + r * stride + j, 1);
      const IndexRange steps = {part.units.begin / AmxProduct::kPairs,
                                (part.units.end + AmxProduct::kPairs - 1) / AmxProduct::kPairs};
      AmxRows a = part.a;
      a.data += steps.begin * a.step;
      alignas(64) float sums[kRows * kColumns];
      AmxProduct::multiply_tiles(part.rows > AmxProduct::kStrips, columns > AmxProduct::kStrips,
                                 steps.end - steps.begin, a, b.panel(first) + steps.begin * AmxProduct::kTileSize,
                                 b.distance(), sums, kColumns);
      for (int64_t r = 0; r < part.rows; ++r, to += stride)
        for_each_vector(columns, [&](int64_t j, auto lanes) {
          const Vec sum = load(sums + r * kColumns + j, AllLanes{});
          store(to + j, combine(i * kRows + r, load(to + j, lanes), sum), lanes);
        });
    }
  }
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA

#endif
