// torch.ops.mindspeed.rms_norm, add_rms_norm and rms_norm_backward on the CPU.
//
// The floor is memory traffic: forward reads x and writes y, backward reads grad_y and x and writes grad_x. Of the
// forward pass only rstd, one number per row, is kept.
#include "rms_norm.h"

#include "chunk_sum.h"
#include "common/cache.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;

void check_arguments(const char* op, const Tensor& x, const std::optional<Tensor>& weight) {
  MINDSPEED_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  if (!weight) return;
  const int64_t hidden = x.size(x.dim() - 1);
  MINDSPEED_CHECK(weight->dim() == 1 && weight->size(0) == hidden, op, ": weight must have shape [", hidden,
                  "], the last dimension of x ", shape(x), ", but has ", shape(*weight));
  dtype_of(*weight, op, "weight");
}

void check_like(const char* op, const char* name, const Tensor& tensor, const char* model_name, const Tensor& model) {
  MINDSPEED_CHECK(same_shape(tensor, model), op, ": ", name, " must have the shape of ", model_name, " ", shape(model),
                  ", but has ", shape(tensor));
  MINDSPEED_CHECK(tensor.scalar_type() == model.scalar_type(), op, ": ", name, " must have the dtype of ", model_name,
                  ", ", model.scalar_type(), ", but has ", tensor.scalar_type());
}

// Half-precision x̂ times a wider weight widens the result, as the multiplication in PyTorch does.
ScalarType output_type(const Tensor& x, const std::optional<Tensor>& weight, bool round_before_weight) {
  const bool widens = round_before_weight && weight && weight->scalar_type() != x.scalar_type();
  return widens ? ScalarType::Float : x.scalar_type();
}

// What x̂ is multiplied by, as float32 [hidden]: weight, 1 + weight if it is zero-centred, or 1 without weight.
Tensor weight_factor(const std::optional<Tensor>& weight, bool zero_centered, int64_t hidden) {
  using namespace torch::stable;
  if (!weight) return full({hidden}, 1.0, ScalarType::Float);
  Tensor wide = *weight;
  if (wide.scalar_type() != ScalarType::Float) wide = to(wide, ScalarType::Float);
  if (zero_centered) wide = subtract(wide, full({1}, 1.0, ScalarType::Float), -1.0);
  return wide.is_contiguous() ? wide : contiguous(wide);
}

// y and rstd; `sum` is filled with x + residual.
std::tuple<Tensor, Tensor> normalize(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                                     const std::optional<Tensor>& sum, const std::optional<Tensor>& weight, double eps,
                                     bool zero_centered, bool round_before_weight) {
  const int64_t hidden = x.size(x.dim() - 1);
  std::vector<int64_t> row_sizes = sizes_of(x);
  row_sizes.pop_back();
  Tensor y = empty(sizes_of(x), output_type(x, weight, round_before_weight));
  Tensor rstd = empty(row_sizes, ScalarType::Float);

  const bool past_cache = writes_past_cache((bytes(x) + bytes(y)) * (residual ? 2 : 1));
  const Rows x_rows(x), residual_rows(residual);
  const Tensor factor = weight_factor(weight, zero_centered, hidden);
  run_parallel(rms_norm_forward_kernel, count_rows(x), hidden,
               RmsNormForward{
                   .hidden = hidden,
                   .eps = static_cast<float>(eps),
                   .round_before_weight = round_before_weight,
                   .x_type = dtype_of(x, op, "x"),
                   .y_type = dtype_of(y, op, "y"),
                   .x = x_rows,
                   .residual = residual_rows,
                   .sum = sum ? output_rows(*sum, false) : OutputRows{},  // read again at once
                   .weight = factor.const_data_ptr<float>(),
                   .y = output_rows(y, past_cache),
                   .rstd = rstd.mutable_data_ptr<float>(),
               });
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                    bool zero_centered, bool round_before_weight) {
  check_arguments("rms_norm", x, weight);
  return normalize("rms_norm", x, std::nullopt, std::nullopt, weight, eps, zero_centered, round_before_weight);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                                const std::optional<Tensor>& weight, double eps, bool zero_centered,
                                                bool round_before_weight) {
  check_arguments("add_rms_norm", x, weight);
  check_like("add_rms_norm", "residual", residual, "x", x);
  Tensor sum = empty(sizes_of(x), x.scalar_type());
  auto [y, rstd] = normalize("add_rms_norm", x, residual, sum, weight, eps, zero_centered, round_before_weight);
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_y, const std::optional<Tensor>& grad_sum,
                                             const Tensor& x, const std::optional<Tensor>& weight, const Tensor& rstd,
                                             bool zero_centered, bool round_before_weight, bool weight_gradient) {
  constexpr const char* op = "rms_norm_backward";
  check_arguments(op, x, weight);
  MINDSPEED_CHECK(same_shape(grad_y, x), op, ": grad_y must have the shape of x ", shape(x), ", but has ",
                  shape(grad_y));
  MINDSPEED_CHECK(grad_y.scalar_type() == output_type(x, weight, round_before_weight), op,
                  ": grad_y must have the dtype of y, ", output_type(x, weight, round_before_weight), ", but has ",
                  grad_y.scalar_type());
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "x", x);
  const int64_t hidden = x.size(x.dim() - 1), rows = count_rows(x);
  MINDSPEED_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.numel() * hidden == x.numel(), op,
                  ": rstd must hold a float32 for each row of x ", shape(x), ", but has shape ", shape(rstd),
                  " and dtype ", rstd.scalar_type());

  const Chunks chunks(rows);
  Tensor grad_x = empty(sizes_of(x), x.scalar_type());
  weight_gradient = weight_gradient && weight;
  Tensor grad_weight = empty({weight_gradient ? hidden : 0}, weight ? weight->scalar_type() : x.scalar_type());
  Tensor partial = empty({weight_gradient ? chunks.count : 0, hidden}, ScalarType::Float);

  const bool past_cache = writes_past_cache(bytes(grad_y) + (grad_sum ? 3 : 2) * bytes(x));
  const Rows grad_y_rows(grad_y), grad_sum_rows(grad_sum), x_rows(x);
  const Tensor factor = weight_factor(weight, zero_centered, hidden), row_rstd = torch::stable::contiguous(rstd);
  run_parallel(rms_norm_backward_kernel, chunks.count, chunks.rows_per_chunk * hidden,
               RmsNormBackward{
                   .rows = rows,
                   .rows_per_chunk = chunks.rows_per_chunk,
                   .hidden = hidden,
                   .round_before_weight = round_before_weight,
                   .x_type = dtype_of(x, op, "x"),
                   .y_type = dtype_of(grad_y, op, "grad_y"),
                   .grad_y = grad_y_rows,
                   .grad_sum = grad_sum_rows,
                   .x = x_rows,
                   .weight = factor.const_data_ptr<float>(),
                   .rstd = row_rstd.const_data_ptr<float>(),
                   .grad_x = output_rows(grad_x, past_cache),
                   .partial_weight = weight_gradient ? partial.mutable_data_ptr<float>() : nullptr,
               });
  if (weight_gradient)
    run_parallel(chunk_sum_kernel, hidden, chunks.count,
                 ChunkSum{
                     .chunks = chunks.count,
                     .columns = hidden,
                     .partial = partial.const_data_ptr<float>(),
                     .type = dtype_of(*weight, op, "weight"),
                     .total = grad_weight.mutable_data_ptr(),
                 });
  return {grad_x, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace mindspeed::cpu
