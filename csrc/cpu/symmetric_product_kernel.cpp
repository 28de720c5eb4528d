#include "symmetric_product.h"

#include "common/group_matrix.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// body(lanes) for the first `count` of kLanes lanes.
template <class Body>
void with_lanes(int64_t count, Body&& body) {
  count == kLanes ? body(AllLanes{}) : body(FirstLanes{count});
}

// alpha · sums + beta · x of kLanes x kLanes elements at most, in its place and transposed in `mirror`. Elements of
// x, out and mirror are `stride` apart from row to row.
template <class T>
void finish_square(const SymmetricProduct& args, int64_t rows, int64_t columns, const float* sums, int64_t sums_stride,
                   const T* x, T* out, T* mirror) {
  Vec v[kLanes] = {};
  with_lanes(columns, [&](auto lanes) {
    for (int64_t r = 0; r < rows; ++r) {
      v[r] = load(sums + r * sums_stride, lanes) * args.alpha;
      if (x != nullptr) v[r] += load(x + r * args.size, lanes) * args.beta;
      store(out + r * args.size, v[r], lanes);
    }
  });
  if (mirror == out) return;  // on the diagonal a block is its own mirror image
  interleave(v);
  with_lanes(rows, [&](auto lanes) {
    for (int64_t c = 0; c < columns; ++c) store(mirror + c * args.size, v[c], lanes);
  });
}

template <class T>
void finish(const SymmetricProduct& args, const GroupBlock& block, const float* sums) {
  const int64_t group = block.group * args.size * args.size;
  const T* x = args.x == nullptr ? nullptr : static_cast<const T*>(args.x) + group;
  T* out = static_cast<T*>(args.out) + group;
  const bool diagonal = block.row == block.column;
  for (int64_t i = 0; i < block.rows; i += kLanes)
    for (int64_t j = 0; j < block.columns; j += kLanes) {
      const int64_t at = (block.row + i) * args.size + block.column + j;
      const int64_t mirrored = (block.column + j) * args.size + block.row + i;
      finish_square(args, std::min<int64_t>(kLanes, block.rows - i), std::min<int64_t>(kLanes, block.columns - j),
                    sums + i * block.columns + j, block.columns, x == nullptr ? nullptr : x + at, out + at,
                    out + (diagonal ? at : mirrored));
    }
}

}  // namespace

void symmetric_product_kernel(const SymmetricProduct& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    const GemmBuffers buffers;
    for (int64_t i = begin; i < end; ++i) {
      const GroupBlock& block = args.blocks[i];
      const Matrix<T> y = matrix_of<T>(args.y, block.group);
      const FloatBuffer sums(block.rows * block.columns);
      gemm(block.rows, block.columns, args.depth, y.from(block.row, 0), y.from(block.column, 0).transpose(),
           sums.data(), block.columns, false, buffers);
      finish<T>(args, block, sums.data());
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
