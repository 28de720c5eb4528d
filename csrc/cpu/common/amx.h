// AMX's tile registers: the few instructions that products of bfloat16 matrices need.
//
// MINDSPEED_EMULATE_AMX, an option of the build, puts a model of them in their place (amx_emulation.h), so that a
// machine without tiles can run and check the code around them.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__) || defined(MINDSPEED_EMULATE_AMX)
#define MINDSPEED_AMX

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr int kAmxTiles = 8, kAmxRows = 16, kAmxRowBytes = 64;  // what palette 1 has

// What LDTILECFG reads: the shape of each tile. Entries past the last tile are reserved, as zeros.
struct alignas(64) TileConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfiguration) == 64);

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA

#ifdef MINDSPEED_EMULATE_AMX
#include "amx_emulation.h"
#else
namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Not the compilers' intrinsics: GCC's take no template arguments, and GCC 12's do not say that they access memory.

inline void tile_load_configuration(const TileConfiguration& configuration) {
  asm volatile("ldtilecfg %0" ::"m"(configuration));
}

// Back to the initial state, in which the system has no tiles to save.
inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int tile>
void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// The tile's rows lie `stride` bytes apart.
template <int tile>
void tile_load(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
void tile_store(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}

// sum [m, n] += a [m, k pairs of bfloat16] · b [k pairs, n].
template <int sum, int a, int b>
void tile_multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
#endif
#endif
