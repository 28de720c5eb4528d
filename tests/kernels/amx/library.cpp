// What test_amx.py calls: products with AMX's tiles emulated.
#define MINDSPEED_ISA amx
#define MINDSPEED_EMULATE_AMX
#include "csrc/cpu/common/gemm.h"

using namespace mindspeed::cpu;
using namespace mindspeed::cpu::amx;

// Tile 0 += tile 1 · tile 2, in the shapes of a configuration of 64 bytes; in memory, all tiles are [16, 64 bytes].
extern "C" void multiply_tiles(const void* configuration, const void* a, const void* b, void* sum) {
  if (configuration != nullptr) {
    TileConfiguration shapes;
    __builtin_memcpy(&shapes, configuration, sizeof shapes);
    tile_load_configuration(shapes);
  }
  tile_load<0>(sum, kAmxRowBytes);
  tile_load<1>(a, kAmxRowBytes);
  tile_load<2>(b, kAmxRowBytes);
  tile_multiply_add<0, 1, 2>();
  tile_store<0>(sum, kAmxRowBytes);
  tile_release();
}

extern "C" void use_after_release() {
  {
    const AmxProduct product;
  }
  tile_zero<0>();
}

extern "C" void multiply_in_place() {
  const AmxProduct product;
  tile_multiply_add<0, 1, 0>();
}

// A product that takes all eight tiles.
extern "C" void multiply_whole_tiles() {
  static const bfloat16 zeros[32 * 32] = {};
  static float c[32 * 32];
  const Matrix<bfloat16> matrix = {zeros, 32};
  gemm(32, 32, 32, matrix, matrix, c, 32, false, GemmBuffers());
}

// C [m, n] (+)= A [m, k] · B [k, n], of bfloat16 and float32 with dense rows; sums [m, n] or a rounded C is bfloat16.
extern "C" void multiply(int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t a_stride, bool a_transposed,
                         const int64_t* a_index, const bfloat16* b, int64_t b_stride, bool b_transposed, void* c,
                         bool accumulate, float* sums) {
  const GemmBuffers buffers;
  const Matrix<bfloat16> left = {a, a_stride, a_transposed, a_index}, right = {b, b_stride, b_transposed};
  if (sums == nullptr)
    gemm(m, n, k, left, right, static_cast<float*>(c), n, accumulate, buffers);
  else
    gemm_rounded(m, n, k, left, right, static_cast<bfloat16*>(c), n, sums, buffers);
}
