// torch.ops.mindspeed.rms_norm_gated and rms_norm_gated_backward on the CPU.
//
// The floor is memory traffic: forward reads x and gate and writes y, backward reads grad_y, x and gate and writes two
// gradients. Of the forward pass only rstd, one number per row, is kept.
#include "rms_norm_gated.h"

#include "chunk_sum.h"
#include "common/cache.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;

void check_like_x(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  MINDSPEED_CHECK(same_shape(tensor, x), op, ": ", name, " must have the shape of x ", shape(x), ", but has ",
                  shape(tensor));
  MINDSPEED_CHECK(tensor.scalar_type() == x.scalar_type(), op, ": ", name, " must have the dtype of x, ",
                  x.scalar_type(), ", but has ", tensor.scalar_type());
}

void check_arguments(const char* op, const Tensor& x, const Tensor& gate, const Tensor& weight) {
  MINDSPEED_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  check_like_x(op, "gate", gate, x);
  const int64_t hidden = x.size(x.dim() - 1);
  MINDSPEED_CHECK(weight.dim() == 1 && weight.size(0) == hidden, op, ": weight must have shape [", hidden,
                  "], the last dimension of x ", shape(x), ", but has ", shape(weight));
  dtype_of(weight, op, "weight");
}

Tensor widened(const Tensor& weight) { return torch::stable::contiguous(torch::stable::to(weight, ScalarType::Float)); }

std::tuple<Tensor, Tensor> rms_norm_gated(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                                          bool sigmoid) {
  constexpr const char* op = "rms_norm_gated";
  check_arguments(op, x, gate, weight);
  const int64_t hidden = x.size(x.dim() - 1);
  std::vector<int64_t> row_sizes = sizes_of(x);
  row_sizes.pop_back();
  Tensor y = empty(sizes_of(x), x.scalar_type()), rstd = empty(row_sizes, ScalarType::Float);
  const Rows x_rows(x), gate_rows(gate);
  const Tensor wide_weight = widened(weight);
  run_parallel(rms_norm_gated_forward_kernel, count_rows(x), hidden,
               RmsNormGatedForward{
                   .hidden = hidden,
                   .eps = static_cast<float>(eps),
                   .sigmoid = sigmoid,
                   .type = dtype_of(x, op, "x"),
                   .x = x_rows,
                   .gate = gate_rows,
                   .weight = wide_weight.const_data_ptr<float>(),
                   .y = output_rows(y, writes_past_cache(3 * bytes(x))),
                   .rstd = rstd.mutable_data_ptr<float>(),
               });
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor& grad_y, const Tensor& x, const Tensor& gate,
                                                           const Tensor& weight, const Tensor& rstd, bool sigmoid) {
  constexpr const char* op = "rms_norm_gated_backward";
  check_arguments(op, x, gate, weight);
  check_like_x(op, "grad_y", grad_y, x);
  const int64_t hidden = x.size(x.dim() - 1), rows = count_rows(x);
  MINDSPEED_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.numel() * hidden == x.numel(), op,
                  ": rstd must hold a float32 for each row of x ", shape(x), ", but has shape ", shape(rstd),
                  " and dtype ", rstd.scalar_type());

  const Chunks chunks(rows);
  Tensor grad_x = empty(sizes_of(x), x.scalar_type()), grad_gate = empty(sizes_of(x), x.scalar_type());
  Tensor grad_weight = empty({hidden}, weight.scalar_type());
  Tensor partial = empty({chunks.count, hidden}, ScalarType::Float);
  const bool past_cache = writes_past_cache(5 * bytes(x));
  const Rows grad_y_rows(grad_y), x_rows(x), gate_rows(gate);
  const Tensor wide_weight = widened(weight), row_rstd = torch::stable::contiguous(rstd);
  run_parallel(rms_norm_gated_backward_kernel, chunks.count, chunks.rows_per_chunk * hidden,
               RmsNormGatedBackward{
                   .rows = rows,
                   .rows_per_chunk = chunks.rows_per_chunk,
                   .hidden = hidden,
                   .sigmoid = sigmoid,
                   .type = dtype_of(x, op, "x"),
                   .grad_y = grad_y_rows,
                   .x = x_rows,
                   .gate = gate_rows,
                   .weight = wide_weight.const_data_ptr<float>(),
                   .rstd = row_rstd.const_data_ptr<float>(),
                   .grad_x = output_rows(grad_x, past_cache),
                   .grad_gate = output_rows(grad_gate, past_cache),
                   .partial_weight = partial.mutable_data_ptr<float>(),
               });
  run_parallel(chunk_sum_kernel, hidden, chunks.count,
               ChunkSum{
                   .chunks = chunks.count,
                   .columns = hidden,
                   .partial = partial.const_data_ptr<float>(),
                   .type = dtype_of(weight, op, "weight"),
                   .total = grad_weight.mutable_data_ptr(),
               });
  return {grad_x, grad_gate, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("rms_norm_gated", TORCH_BOX(&rms_norm_gated));
  m.impl("rms_norm_gated_backward", TORCH_BOX(&rms_norm_gated_backward));
}

}  // namespace mindspeed::cpu
