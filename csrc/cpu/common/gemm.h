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
  // What is packed at a time. A block of A, 256 KB, stays in the second-level cache while the panels of B pass; the
  // longer the depth, the less often is C read and written, and the wider B, the less often is A packed.
  static constexpr int64_t kBlockUnits = 512, kBlockRows = 16 * kTileRows;
  static constexpr int64_t kBlockDepth = kBlockUnits * kDepthPerUnit<T>;
  static constexpr int64_t kBlockColumns = 1056 / kTileColumns * kTileColumns;
  static constexpr int64_t kDepthUnit = kLanes * kDepthPerUnit<T>, kRowUnit = kTileRows, kColumnUnit = kTileColumns;
  static constexpr int64_t kSizeA = kBlockRows / kTileRows * panel_size(kBlockUnits, kTileRows);
  static constexpr int64_t kSizeB = kBlockColumns / kTileColumns * panel_size(kBlockUnits, kTileColumns);

  static void pack_a(const Matrix<T>& a, int64_t rows, int64_t depth, float* packed) {
    pack<T, kTileRows>(a, rows, depth, packed);
  }

  static void pack_b(const Matrix<T>& b, int64_t columns, int64_t depth, float* packed) {
    pack<T, kTileColumns>(b.transpose(), columns, depth, packed);
  }

  // C [rows, columns] (+)= A · B, both packed.
  template <class C>
  static void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, C* c,
                       int64_t stride, bool accumulate) {
    const int64_t units = units_of<T>(depth);
    for (int64_t j = 0; j < columns; j += kTileColumns, b += panel_size(units, kTileColumns)) {
      const float* panel = a;
      for (int64_t i = 0; i < rows; i += kTileRows, panel += panel_size(units, kTileRows))
        multiply_partial_tile<T>(units, panel, b, c + i * stride + j, stride, std::min<int64_t>(kTileRows, rows - i),
                                 std::min<int64_t>(kTileColumns, columns - j), accumulate);
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
  const int64_t block_rows = block_size(m, Product::kBlockRows, Product::kRowUnit);
  const int64_t block_columns = block_size(n, Product::kBlockColumns, Product::kColumnUnit);
  const int64_t block_depth = block_size(k, Product::kBlockDepth, Product::kDepthUnit);
  for (int64_t j = 0; j < n; j += block_columns) {
    const int64_t columns = std::min(block_columns, n - j);
    for (int64_t d = 0; d < k; d += block_depth) {
      const int64_t depth = std::min(block_depth, k - d);
      product.pack_b(b.from(d, j), columns, depth, buffers.b.data());
      for (int64_t i = 0; i < m; i += block_rows) {
        const int64_t rows = std::min(block_rows, m - i);
        product.pack_a(a.from(i, d), rows, depth, buffers.a.data());
        product.multiply(rows, columns, depth, buffers.a.data(), buffers.b.data(), c + i * stride + j, stride,
                         accumulate || d > 0);
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
