// torch.ops.mindspeed.grouped_gemm and grouped_gemm_weight_gradient on the CPU.
//
// The floor is the multiplier's. Blocks of the result are spread over threads; each packs the operands it needs.
#include "grouped_gemm.h"

#include "common/groups.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;

void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  MINDSPEED_CHECK(tensor.scalar_type() == x.scalar_type(), op, ": ", name, " must have the dtype of x, ",
                  x.scalar_type(), ", but has ", tensor.scalar_type());
}

Tensor grouped_gemm(const Tensor& x, const Tensor& weight, const Tensor& offsets, bool transposed) {
  constexpr const char* op = "grouped_gemm";
  MINDSPEED_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(transposed ? 1 : 2), op, ": x ",
                  shape(x), " must be [rows, k] and weight ", shape(weight), " must be [groups, ",
                  transposed ? "k, n]" : "n, k]");
  check_same_dtype(op, "weight", weight, x);
  MINDSPEED_CHECK(offsets.numel() == weight.size(0), op, ": offsets must have one entry for each group of weight ",
                  shape(weight), ", but have shape ", shape(offsets));
  const int64_t rows = x.size(0), columns = weight.size(transposed ? 2 : 1);
  const Groups groups(op, offsets, rows);
  Tensor y = empty({rows, columns}, x.scalar_type());
  if (x.numel() == 0) return torch::stable::zero_(y);
  const std::vector<GroupBlock> blocks = groups.blocks_of_rows(columns);
  const Rows x_rows(x);
  const StackedWeights matrices(weight, transposed);
  run_dynamic(grouped_gemm_kernel, blocks.size(),
              GroupedGemm{
                  .type = dtype_of(x, op, "x"),
                  .depth = x.size(1),
                  .columns = columns,
                  .blocks = blocks.data(),
                  .x = x_rows,
                  .weight = matrices,
                  .bias = nullptr,
                  .bias_scale = nullptr,
                  .y = output_rows(y, false),
              });
  Tensor rest = torch::stable::narrow(y, 0, groups.rows(), rows - groups.rows());
  torch::stable::zero_(rest);
  return y;
}

Tensor grouped_gemm_weight_gradient(const Tensor& grad_y, const Tensor& x, const Tensor& offsets, bool transposed) {
  constexpr const char* op = "grouped_gemm_weight_gradient";
  MINDSPEED_CHECK(grad_y.dim() == 2 && x.dim() == 2 && grad_y.size(0) == x.size(0), op, ": grad_y ", shape(grad_y),
                  " must be [rows, n] and x ", shape(x), " must be [rows, k]");
  check_same_dtype(op, "grad_y", grad_y, x);
  const Groups groups(op, offsets, x.size(0));
  const Tensor &left = transposed ? x : grad_y, &right = transposed ? grad_y : x;
  Tensor grad_weight = empty({groups.count(), left.size(1), right.size(1)}, x.scalar_type());
  if (x.size(0) == 0) return torch::stable::zero_(grad_weight);
  const std::vector<GroupBlock> blocks = groups.blocks_of_matrices(left.size(1), right.size(1));
  const Rows left_rows(left), right_rows(right);
  run_dynamic(grouped_outer_product_kernel, blocks.size(),
              GroupedOuterProduct{
                  .type = dtype_of(x, op, "x"),
                  .bounds = groups.bounds(),
                  .blocks = blocks.data(),
                  .left = left_rows,
                  .right = right_rows,
                  .left_index = nullptr,
                  .right_index = nullptr,
                  .z = grad_weight.mutable_data_ptr(),
                  .rows = left.size(1),
                  .columns = right.size(1),
              });
  return grad_weight;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("grouped_gemm", TORCH_BOX(&grouped_gemm));
  m.impl("grouped_gemm_weight_gradient", TORCH_BOX(&grouped_gemm_weight_gradient));
}

}  // namespace mindspeed::cpu
