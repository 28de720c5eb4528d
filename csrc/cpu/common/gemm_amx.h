// Products of bfloat16 matrices with AMX.
//
// A tile register holds 16 rows of 64 bytes: 16 x 16 sums of C, or, for a step of 16 pairs along the depth, 16 rows of
// A (a row of pairs for each) or 16 columns of B (a row of columns for each pair). Four tiles of sums take two of A and
// two of B per step, so that a product, 8192 multiply-adds in 16 cycles, costs one load of 8 cycles, not two. That is
// the floor: 512 multiply-adds per cycle. Packing and the sums' way through memory come on top. Operands are padded
// with zeros to whole tiles, so that a single configuration serves every product.
#pragma once

#include "amx.h"
#include "gemm_pack.h"

#ifdef MINDSPEED_AMX

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Where a left operand lies: how many floats its rows, its steps along the depth and its panels of rows are apart.
struct AmxRows {
  const float* data;
  int64_t row, step, panel;
};

// The tiles are configured for as long as an object of this class lives.
class AmxProduct {
 public:
  static constexpr int kStrips = kAmxRows;               // rows or columns in a panel
  static constexpr int kPairs = kAmxRowBytes / 4;        // in a step
  static constexpr int kTileSize = kStrips * kPairs;     // floats of memory
  static_assert(kStrips == kLanes && kPairs == kLanes);  // packing transposes tiles in registers

  // What is packed at a time. The panels that four tiles of sums are made of take 40 KB, within a first-level cache of
  // 48 KB: those of B stay there while A streams by, out of the second level, 32 bytes per cycle at the floor.
  static constexpr int64_t kBlockDepth = 320, kBlockRows = 1056, kBlockColumns = 256;
  static constexpr int64_t kDepthUnit = 2 * kPairs, kRowUnit = 2 * kStrips, kColumnUnit = 2 * kStrips;
  static constexpr int64_t kSizeA = kBlockRows / kStrips * panel_size(kBlockDepth / 2, kStrips);
  static constexpr int64_t kSizeB = kBlockColumns / kStrips * panel_size(kBlockDepth / 2, kStrips);

  static int64_t block_rows(int64_t /*depth*/) { return kBlockRows; }
  static constexpr int64_t steps_of(int64_t depth) { return (depth + kDepthUnit - 1) / kDepthUnit; }
  static constexpr int64_t panel_of(int64_t depth) { return panel_size(steps_of(depth) * kPairs, kStrips); }

  AmxProduct() { tile_load_configuration(kConfiguration); }
  ~AmxProduct() { tile_release(); }
  AmxProduct(const AmxProduct&) = delete;
  AmxProduct& operator=(const AmxProduct&) = delete;

  static void pack_a(const Matrix<bfloat16>& a, int64_t rows, int64_t depth, float* packed) {
    pack_tiles<false>(a, rows, depth, packed);
  }

  static void pack_b(const Matrix<bfloat16>& b, int64_t columns, int64_t depth, float* packed) {
    pack_tiles<true>(b.transpose(), columns, depth, packed);
  }

  // C [rows, columns] (+)= A · B, both packed.
  template <class C, class Fetch>
  void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, C* c, int64_t stride,
                bool accumulate, Fetch&& /*fetch_next*/) const {
    const int64_t steps = steps_of(depth), panel = panel_of(depth);
    for (int64_t j = 0; j < columns; j += 2 * kStrips)
      for (int64_t i = 0; i < rows; i += 2 * kStrips) {
        alignas(64) float sums[2 * kStrips * kColumnUnit];
        const AmxRows rows_of_a = {a + i / kStrips * panel, kPairs, kTileSize, panel};
        multiply_tiles(rows - i > kStrips, columns - j > kStrips, steps, rows_of_a, b + j / kStrips * panel, panel,
                       sums, kColumnUnit);
        for (int64_t r = 0; r < std::min<int64_t>(2 * kStrips, rows - i); ++r)
          for_each_vector(std::min<int64_t>(kColumnUnit, columns - j), [&](int64_t s, auto lanes) {
            C* p = c + (i + r) * stride + j + s;
            const Vec sum = load(sums + r * kColumnUnit + s, lanes);
            store(p, accumulate ? load(p, lanes) + sum : sum, lanes);
          });
      }
  }

  // The products of two panels of A and of two of B, `panel` floats apart, or of one where there is no second. Rows of
  // sums are `stride` floats apart.
  static void multiply_tiles(bool two_of_a, bool two_of_b, int64_t steps, const AmxRows& a, const float* b,
                             int64_t panel, float* sums, int64_t stride) {
    if (two_of_a)
      two_of_b ? multiply_tiles<2, 2>(steps, a, b, panel, sums, stride)
               : multiply_tiles<2, 1>(steps, a, b, panel, sums, stride);
    else
      two_of_b ? multiply_tiles<1, 2>(steps, a, b, panel, sums, stride)
               : multiply_tiles<1, 1>(steps, a, b, panel, sums, stride);
  }

  // Tiles `distance` floats apart, in place.
  static void transpose_tiles(int64_t tiles, float* tile, int64_t distance) {
    for (; tiles > 0; --tiles, tile += distance) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = load(tile + i * kLanes, AllLanes{});
      interleave(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(tile + i * kLanes, rows[i], AllLanes{});
    }
  }

 private:
  static constexpr TileConfiguration kConfiguration = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

  // Panels of kStrips strips, which are the rows of `matrix`: [panels, steps, tile]. A tile has a row for each strip,
  // or for each pair if `pairs_first`; it is copied as it is stored, and transposed while it is in the first-level
  // cache.
  template <bool pairs_first>
  static void pack_tiles(const Matrix<bfloat16>& matrix, int64_t strips, int64_t depth, float* packed) {
    const int64_t panel = panel_of(depth);
    if (matrix.transposed) {
      for (int64_t d = 0; d < depth; d += kDepthUnit, packed += kTileSize) {
        copy_pairs(matrix.from(0, d), strips, depth - d, packed, panel);
        if (!pairs_first) transpose_tiles((strips + kStrips - 1) / kStrips, packed, panel);
      }
    } else {
      for (int64_t s = 0; s < strips; s += kStrips, packed += panel) {
        copy_strips(matrix.from(s, 0), strips - s, depth, packed);
        if (pairs_first) transpose_tiles(steps_of(depth), packed, kTileSize);
      }
    }
  }

  // One panel, with a row of pairs for each strip, which is a stored row.
  static void copy_strips(const Matrix<bfloat16>& stored, int64_t strips, int64_t depth, float* panel) {
    for (int s = 0; s < kStrips; ++s) {
      const bfloat16* row = s < strips ? stored.stored_row(s) : nullptr;
      float* to = panel + s * kPairs;
      for (int64_t d = 0; d < depth; d += kDepthUnit, to += kTileSize)
        store(to, row == nullptr ? Vec{} : load_units(row + d, depth - d), AllLanes{});
    }
  }

  // One step of all panels, with a row of strips for each pair, which is in two stored rows.
  static void copy_pairs(const Matrix<bfloat16>& stored, int64_t strips, int64_t depth, float* tile, int64_t panel) {
    for (int64_t d = 0; d < kDepthUnit; d += 2, tile += kStrips) {
      const bfloat16* first = d < depth ? stored.stored_row(d) : nullptr;
      const bfloat16* second = d + 1 < depth ? stored.stored_row(d + 1) : nullptr;
      for_each_vector(strips, [&](int64_t s, auto lanes) {
        Vec pairs = {};
        if (first != nullptr) pairs = load_across(first + s, second == nullptr ? nullptr : second + s, lanes);
        store(tile + s / kStrips * panel, pairs, AllLanes{});
      });
    }
  }

  // Tiles 0 to 3 are sums, 4 and 5 are of A, 6 and 7 of B.
  template <int down, int across>
  static void multiply_tiles(int64_t steps, const AmxRows& a, const float* b, int64_t panel, float* sums,
                             int64_t stride) {
    const int64_t row_bytes = a.row * sizeof(float), sum_bytes = stride * sizeof(float);
    const float* rows = a.data;
    tile_zero<0>();
    if constexpr (across == 2) tile_zero<1>();
    if constexpr (down == 2) tile_zero<2>();
    if constexpr (down == 2 && across == 2) tile_zero<3>();
    for (int64_t step = 0; step < steps; ++step, rows += a.step, b += kTileSize) {
      tile_load<4>(rows, row_bytes);
      tile_load<6>(b, kAmxRowBytes);
      tile_multiply_add<0, 4, 6>();
      if constexpr (across == 2) tile_load<7>(b + panel, kAmxRowBytes);
      if constexpr (across == 2) tile_multiply_add<1, 4, 7>();
      if constexpr (down == 2) tile_load<5>(rows + a.panel, row_bytes);
      if constexpr (down == 2) tile_multiply_add<2, 5, 6>();
      if constexpr (down == 2 && across == 2) tile_multiply_add<3, 5, 7>();
    }
    float* lower = sums + kStrips * stride;
    tile_store<0>(sums, sum_bytes);
    if constexpr (across == 2) tile_store<1>(sums + kStrips, sum_bytes);
    if constexpr (down == 2) tile_store<2>(lower, sum_bytes);
    if constexpr (down == 2 && across == 2) tile_store<3>(lower + kStrips, sum_bytes);
  }
};

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA

#endif
