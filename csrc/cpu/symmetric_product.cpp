// torch.ops.mindspeed.symmetric_product on the CPU.
//
// The floor is half of the multiplications. Blocks below the diagonal are computed once for both their places; those on
// it are cut in halves, so that little is computed twice.
#include "symmetric_product.h"

#include <vector>

#include "common/groups.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

constexpr const char* kOp = "symmetric_product";

// The blocks of the rows and columns [begin, end) of one group, on and below the diagonal, the largest first.
void append_triangle(std::vector<GroupBlock>& blocks, int64_t group, int64_t begin, int64_t end, int64_t largest,
                     int64_t smallest) {
  const int64_t count = std::max<int64_t>(1, (end - begin + largest - 1) / largest);
  const auto bound = [&](int64_t i) { return begin + (end - begin) * i / count; };
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < i; ++j)
      blocks.push_back({group, bound(i), bound(i + 1) - bound(i), bound(j), bound(j + 1) - bound(j)});
  for (int64_t i = 0; i < count; ++i) {
    if (largest > smallest)
      append_triangle(blocks, group, bound(i), bound(i + 1), largest / 2, smallest);
    else
      blocks.push_back({group, bound(i), bound(i + 1) - bound(i), bound(i), bound(i + 1) - bound(i)});
  }
}

Tensor symmetric_product(const Tensor& y, const std::optional<Tensor>& x, double alpha, double beta) {
  MINDSPEED_CHECK(y.dim() == 3, kOp, ": y must be [batch, size, depth], but has shape ", shape(y));
  const int64_t batch = y.size(0), size = y.size(1);
  if (x) {
    MINDSPEED_CHECK(x->dim() == 3 && x->size(0) == batch && x->size(1) == size && x->size(2) == size, kOp,
                    ": x must be [", batch, ", ", size, ", ", size, "], but has shape ", shape(*x));
    MINDSPEED_CHECK(x->scalar_type() == y.scalar_type(), kOp, ": x must have the dtype of y, ", y.scalar_type(),
                    ", but has ", x->scalar_type());
  }
  std::vector<GroupBlock> blocks;
  for (int64_t g = 0; g < batch; ++g) append_triangle(blocks, g, 0, size, 512, 256);
  Tensor out = torch::stable::empty({batch, size, size}, y.scalar_type());
  if (out.numel() == 0) return out;
  const std::optional<Tensor> dense = x ? std::optional(torch::stable::contiguous(*x)) : std::nullopt;
  run_dynamic(symmetric_product_kernel, blocks.size(),
              SymmetricProduct{
                  .type = dtype_of(y, kOp, "y"),
                  .size = size,
                  .depth = y.size(2),
                  .blocks = blocks.data(),
                  .y = StackedWeights(y, true),
                  .x = dense ? dense->const_data_ptr() : nullptr,
                  .alpha = static_cast<float>(alpha),
                  .beta = static_cast<float>(beta),
                  .out = out.mutable_data_ptr(),
              });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("symmetric_product", TORCH_BOX(&symmetric_product)); }

}  // namespace mindspeed::cpu
