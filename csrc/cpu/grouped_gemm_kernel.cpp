#include "grouped_gemm.h"

#include "common/group_matrix.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// y = sums + scale · bias.
template <class T>
void add_bias(const float* sums, const float* bias, float scale, T* y, int64_t columns) {
  for_each_vector(columns, [&](int64_t j, auto lanes) {
    store(y + j, load(sums + j, lanes) + load(bias + j, lanes) * scale, lanes);
  });
}

}  // namespace

void grouped_gemm_kernel(const GroupedGemm& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    const GemmBuffers buffers;
    for (int64_t i = begin; i < end; ++i) {
      const GroupBlock& block = args.blocks[i];
      const Matrix<T> x = matrix_of<T>(args.x, nullptr, block.row);
      const Matrix<T> weight = matrix_of<T>(args.weight, block.group).from(0, block.column);
      const FloatBuffer sums(block.rows * block.columns);
      T* y = row<T>(args.y, block.row) + block.column;
      if (args.bias == nullptr) {
        gemm_rounded(block.rows, block.columns, args.depth, x, weight, y, args.y.stride, sums.data(), buffers);
        continue;
      }
      gemm(block.rows, block.columns, args.depth, x, weight, sums.data(), block.columns, false, buffers);
      const float* bias = args.bias + block.group * args.columns + block.column;
      for (int64_t r = 0; r < block.rows; ++r)
        add_bias(sums.data() + r * block.columns, bias, args.bias_scale[block.row + r], y + r * args.y.stride,
                 block.columns);
    }
  });
}

void grouped_outer_product_kernel(const GroupedOuterProduct& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    const GemmBuffers buffers;
    for (int64_t i = begin; i < end; ++i) {
      const GroupBlock& block = args.blocks[i];
      const int64_t first = args.bounds[block.group], depth = args.bounds[block.group + 1] - first;
      const Matrix<T> left = matrix_of<T>(args.left, args.left_index, first).transpose().from(block.row, 0);
      const Matrix<T> right = matrix_of<T>(args.right, args.right_index, first).from(0, block.column);
      const FloatBuffer sums(block.rows * block.columns);
      T* z = static_cast<T*>(args.z) + (block.group * args.rows + block.row) * args.columns + block.column;
      gemm_rounded(block.rows, block.columns, depth, left, right, z, args.columns, sums.data(), buffers);
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
