// Products of matrices inside a kernel, on the calling thread.
//
// Operands are float32, bfloat16 or float16, sums are float32. Where there is an instruction for it, bfloat16 is
// multiplied as such (gemm_amx.h, gemm_tile.h); otherwise half precision is widened while it is packed.
#pragma once

#include <type_traits>

#include "float_buffer.h"
#include "gemm_amx.h"
#include "gemm_pack.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Blocks of A and B multiplied by vector instructions, for all element types and levels.
template <class T>
struct VectorProduct {
  // What is packed at a time: a block of A as deep as this, so that C is rarely read and written again, and one panel
  // of B, which stays in the second-level cache while A's stream by.
  static constexpr int64_t kBlockUnits = 1024, kBlockDepth = kBlockUnits * kDepthPerUnit<T>;
  static constexpr int64_t kBlockColumns = kTileColumns;
  static constexpr int64_t kDepthUnit = kLanes * kDepthPerUnit<T>, kRowUnit = kTileRows, kColumnUnit = kTileColumns;
  static constexpr int64_t kUnitsOfA = 512 * kBlockUnits, kMostRows = 2048;
  static constexpr int64_t kSizeA = kUnitsOfA + kMostRows / kTileRows * panel_size(0, kTileRows);
  static constexpr int64_t kSizeB = panel_size(kBlockUnits, kTileColumns);

  // How many rows a block of A has at most: the more the shallower it is, within 2 MB.
  static int64_t block_rows(int64_t depth) {
    const int64_t rows = kUnitsOfA / std::max<int64_t>(1, units_of<T>(depth));
    return std::min(kMostRows, rows / kTileRows * kTileRows);
  }

  static void pack_a(const Matrix<T>& a, int64_t rows, int64_t depth, float* packed) {
    pack<T, kTileRows>(a, rows, depth, packed);
  }

  static void pack_b(const Matrix<T>& b, int64_t columns, int64_t depth, float* packed) {
    pack<T, kTileColumns>(b.transpose(), columns, depth, packed);
  }

  // C [rows, columns] (+)= A · B, both packed. `fetch_next(part, parts)` asks for what is packed next: memory takes
  // longer to bring it than packing to reorder it.
  template <class C, class Fetch>
  static void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, C* c,
                       int64_t stride, bool accumulate, Fetch&& fetch_next) {
    constexpr int64_t kLastTiles = 16;  // what they read of A leaves it in the cache
    const int64_t units = units_of<T>(depth), tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t parts = std::min(kLastTiles, tiles);
    for (int64_t tile = 0; tile < tiles; ++tile, a += panel_size(units, kTileRows)) {
      const int64_t i = tile * kTileRows, part = tile - (tiles - parts);
      if (part >= 0) fetch_next(part, parts);
      multiply_partial_tile<T>(units, a, b, c + i * stride, stride, std::min<int64_t>(kTileRows, rows - i), columns,
                               accumulate);
    }
  }
};

#ifdef MINDSPEED_AMX
template <class T>
using BlockProduct = std::conditional_t<std::is_same_v<T, bfloat16>, AmxProduct, VectorProduct<T>>;
#else
template <class T>
using BlockProduct = VectorProduct<T>;
#endif

// What one thread packs operands into. A kernel makes one for all its products.
struct GemmBuffers {
  FloatBuffer a{std::max(VectorProduct<float>::kSizeA, BlockProduct<bfloat16>::kSizeA)};
  FloatBuffer b{std::max(VectorProduct<float>::kSizeB, BlockProduct<bfloat16>::kSizeB)};
};

// The size of the blocks that a dimension is cut into: all about alike, multiples of `unit`, and at most `largest`.
constexpr int64_t block_size(int64_t length, int64_t largest, int64_t unit) {
  const int64_t blocks = std::max<int64_t>(1, (length + largest - 1) / largest);
  return (length + blocks * unit - 1) / (blocks * unit) * unit;
}

// C [m, n] = A [m, k] · B [k, n], or C += A · B. C's rows are `stride` elements apart. Sums are float32, their order
// depends on k alone: an element comes out the same in whichever part of C it is asked for. C is float, or half
// precision (gemm_rounded) if the depth is a single block, whose sums the tiles hold to their end.
template <class T, class C>
void gemm(int64_t m, int64_t n, int64_t k, const Matrix<T>& a, const Matrix<T>& b, C* c, int64_t stride,
          bool accumulate, const GemmBuffers& buffers) {
  if (k == 0 && !accumulate)
    for (int64_t i = 0; i < m; ++i) __builtin_memset(c + i * stride, 0, n * sizeof(C));
  using Product = BlockProduct<T>;
  const Product product{};
  const int64_t block_depth = block_size(k, Product::kBlockDepth, Product::kDepthUnit);
  const int64_t block_rows = block_size(m, Product::block_rows(block_depth), Product::kRowUnit);
  const int64_t block_columns = block_size(n, Product::kBlockColumns, Product::kColumnUnit);
  for (int64_t i = 0; i < m; i += block_rows) {
    const int64_t rows = std::min(block_rows, m - i);
    for (int64_t d = 0; d < k; d += block_depth) {
      const int64_t depth = std::min(block_depth, k - d);
      product.pack_a(a.from(i, d), rows, depth, buffers.a.data());
      for (int64_t j = 0, next; j < n; j = next) {
        next = std::min(j + block_columns, n);
        product.pack_b(b.from(d, j), next - j, depth, buffers.b.data());
        const auto fetch_next = [&](int64_t part, int64_t parts) {
          const int64_t columns = std::min(block_columns, n - next);
          if (columns > 0) prefetch(b.from(d, next).transpose(), columns, depth, part, parts);
        };
        product.multiply(rows, next - j, depth, buffers.a.data(), buffers.b.data(), c + i * stride + j, stride,
                         accumulate || d > 0, fetch_next);
      }
    }
  }
}

// C [m, n] = A [m, k] · B [k, n] rounded to T once; `sums` [m, n] is for depths of several blocks.
template <class T>
void gemm_rounded(int64_t m, int64_t n, int64_t k, const Matrix<T>& a, const Matrix<T>& b, T* c, int64_t stride,
                  float* sums, const GemmBuffers& buffers) {
  if (std::is_same_v<T, float> || k <= BlockProduct<T>::kBlockDepth) {
    gemm(m, n, k, a, b, c, stride, false, buffers);
    return;
  }
  gemm(m, n, k, a, b, sums, n, false, buffers);
  for (int64_t i = 0; i < m; ++i)
    for_each_vector(n, [&](int64_t j, auto lanes) { store(c + i * stride + j, load(sums + i * n + j, lanes), lanes); });
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
