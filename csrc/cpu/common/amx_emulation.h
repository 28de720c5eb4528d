// A model of AMX's tile registers, for tests on machines without them: same functions, same results, same faults.
//
// It follows the instructions' descriptions in Intel's Software Developer's Manual. Where the processor would raise an
// exception, the model says why and aborts. It needs AVX-512.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "amx.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// The tile registers of one thread.
struct EmulatedTiles {
  bool configured;
  TileConfiguration shape;
  uint32_t data[kAmxTiles][kAmxRows][kAmxRowBytes / 4];
};

inline thread_local EmulatedTiles emulated_tiles = {};
inline thread_local int64_t emulated_products = 0;  // since the thread began, for tests to see that there were any

inline void require(bool condition, const char* fault, const char* instruction, const char* why) {
  if (condition) return;
  std::fprintf(stderr, "AMX emulation: %s in %s: %s\n", fault, instruction, why);
  std::abort();
}

inline void require_configured(int tile, const char* instruction) {
  const EmulatedTiles& tiles = emulated_tiles;
  require(tiles.configured, "#UD", instruction, "no configuration is loaded");
  require(tile >= 0 && tile < kAmxTiles, "#UD", instruction, "there is no such tile");
  require(tiles.shape.rows[tile] != 0, "#UD", instruction, "the configuration leaves the tile out");
}

inline void tile_release() { emulated_tiles = {}; }

inline void tile_load_configuration(const TileConfiguration& shape) {
  const auto check = [](bool condition, const char* why) { require(condition, "#GP", "LDTILECFG", why); };
  check(shape.palette <= 1, "unknown palette");
  check(shape.start_row == 0, "a start row is for going on after a page fault");
  for (const uint8_t byte : shape.reserved) check(byte == 0, "a reserved byte is not zero");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = shape.rows[tile], bytes = shape.row_bytes[tile];
    check(tile < kAmxTiles || (rows == 0 && bytes == 0), "a reserved byte is not zero");
    check(rows <= kAmxRows && bytes <= kAmxRowBytes, "a tile is too large");
    check((rows == 0) == (bytes == 0), "a tile has rows without columns or columns without rows");
  }
  tile_release();  // loading a configuration clears all tiles
  emulated_tiles.configured = shape.palette == 1;
  emulated_tiles.shape = shape;
}

template <int tile>
void tile_zero() {
  require_configured(tile, "TILEZERO");
  __builtin_memset(emulated_tiles.data[tile], 0, sizeof emulated_tiles.data[tile]);
}

template <int tile>
void tile_load(const void* rows, int64_t stride) {
  require_configured(tile, "TILELOADD");
  EmulatedTiles& tiles = emulated_tiles;
  __builtin_memset(tiles.data[tile], 0, sizeof tiles.data[tile]);  // also beyond the tile's shape
  for (int r = 0; r < tiles.shape.rows[tile]; ++r)
    __builtin_memcpy(tiles.data[tile][r], static_cast<const char*>(rows) + r * stride, tiles.shape.row_bytes[tile]);
}

template <int tile>
void tile_store(void* rows, int64_t stride) {
  require_configured(tile, "TILESTORED");
  const EmulatedTiles& tiles = emulated_tiles;
  for (int r = 0; r < tiles.shape.rows[tile]; ++r)
    __builtin_memcpy(static_cast<char*>(rows) + r * stride, tiles.data[tile][r], tiles.shape.row_bytes[tile]);
}

// For each element of the result: the sums over k of the products of the pairs' lower halves and of their upper halves,
// by fused multiply-adds, then both together, then onto what was there. A function of its own, not inlined, so that the
// compiler cannot move arithmetic to where another rounding holds.
__attribute__((noinline)) inline void multiply_add_rows(int rows, int pairs, const uint32_t (*a)[16],
                                                        const uint32_t (*b)[16], uint32_t (*sum)[16]) {
  const auto lower = [](Bits32 pair) { return (__m512)(pair << 16); };
  const auto upper = [](Bits32 pair) { return (__m512)(pair & 0xffff0000); };
  for (int m = 0; m < rows; ++m) {
    __m512 lower_sum = {}, upper_sum = {};
    for (int k = 0; k < pairs; ++k) {
      const Bits32 left = a[m][k] - Bits32{}, right = (Bits32)_mm512_loadu_si512(b[k]);
      lower_sum = _mm512_fmadd_ps(lower(left), lower(right), lower_sum);
      upper_sum = _mm512_fmadd_ps(upper(left), upper(right), upper_sum);
    }
    const __m512 before = _mm512_loadu_ps(sum[m]);
    _mm512_storeu_ps(sum[m], _mm512_add_ps(before, _mm512_add_ps(lower_sum, upper_sum)));
  }
}

template <int sum, int a, int b>
void tile_multiply_add() {
  const auto check = [](bool condition, const char* why) { require(condition, "#UD", "TDPBF16PS", why); };
  for (const int tile : {sum, a, b}) require_configured(tile, "TDPBF16PS");
  EmulatedTiles& tiles = emulated_tiles;
  const auto& [palette, start_row, reserved, row_bytes, rows] = tiles.shape;
  check(sum != a && sum != b && a != b, "the three tiles must differ");
  for (const int tile : {sum, a, b}) check(row_bytes[tile] % 4 == 0, "rows must be whole pairs");
  check(rows[a] == rows[sum], "the left tile's rows are not the result's");
  check(row_bytes[b] == row_bytes[sum], "the right tile's columns are not the result's");
  check(row_bytes[a] == 4 * rows[b], "the left tile's columns are not the right tile's rows");

  // Nearest even, subnormal numbers read and written as 0, no exceptions; and MXCSR as it was.
  constexpr unsigned kMaskedNearest = 0x1f80, kReadAsZero = 0x40, kWriteAsZero = 0x8000;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kMaskedNearest | kReadAsZero | kWriteAsZero);
  multiply_add_rows(rows[sum], row_bytes[a] / 4, tiles.data[a], tiles.data[b], tiles.data[sum]);
  _mm_setcsr(before);
  ++emulated_products;
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
