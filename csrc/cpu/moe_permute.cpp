// torch.ops.mindspeed.moe_permute, moe_unpermute and moe_unpermute_backward on the CPU.
//
// The floor is memory traffic: each row is read and written once. Sorting counts and places the assignments on one
// thread, in two passes over the indices.
#include "moe_permute.h"

#include <algorithm>

#include "common/cache.h"
#include "common/parallel.h"
#include "common/routing.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;

void check_top_k(const char* op, int64_t top_k) {
  MINDSPEED_CHECK(1 <= top_k && top_k <= kMaxTopK, op, ": top_k must be in [1, ", kMaxTopK, "], but is ", top_k);
}

std::tuple<Tensor, Tensor, Tensor> moe_permute(const Tensor& x, const Tensor& expert_index, int64_t num_experts) {
  constexpr const char* op = "moe_permute";
  MINDSPEED_CHECK(x.dim() == 2 && expert_index.dim() == 2 && x.size(0) == expert_index.size(0), op, ": x ", shape(x),
                  " must be [tokens, hidden] and expert_index ", shape(expert_index), " must be [tokens, top_k]");
  const int64_t hidden = x.size(1), top_k = expert_index.size(1);
  check_top_k(op, top_k);
  const Routing routing = Routing::sort(op, expert_index, num_experts);
  const auto rows = static_cast<int64_t>(routing.source.size());

  Tensor sorted = empty({rows, hidden}, x.scalar_type());
  const Rows x_rows(x);
  run_parallel(moe_permute_kernel, rows, hidden,
               MoePermute{
                   .type = dtype_of(x, op, "x"),
                   .hidden = hidden,
                   .top_k = top_k,
                   .source = routing.source.data(),
                   .x = x_rows,
                   .sorted = output_rows(sorted, writes_past_cache(bytes(x) + bytes(sorted))),
               });
  Tensor offsets = empty({num_experts}, ScalarType::Int), source = empty({rows}, ScalarType::Long);
  std::copy(routing.bounds.begin() + 1, routing.bounds.end(), offsets.mutable_data_ptr<int32_t>());
  std::copy(routing.source.begin(), routing.source.end(), source.mutable_data_ptr<int64_t>());
  return {sorted, offsets, source};
}

// The weights as float32 in rows without gaps.
std::optional<Tensor> float_weights(const char* op, const std::optional<Tensor>& weights, int64_t tokens,
                                    int64_t top_k) {
  if (!weights) return std::nullopt;
  MINDSPEED_CHECK(weights->dim() == 2 && weights->size(0) == tokens && weights->size(1) == top_k, op,
                  ": weights must be [tokens, top_k] = [", tokens, ", ", top_k, "], but have shape ", shape(*weights));
  dtype_of(*weights, op, "weights");
  return torch::stable::contiguous(torch::stable::to(*weights, ScalarType::Float));
}

const float* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

Tensor moe_unpermute(const Tensor& y, const Tensor& source, const std::optional<Tensor>& weights, int64_t top_k) {
  constexpr const char* op = "moe_unpermute";
  check_top_k(op, top_k);
  MINDSPEED_CHECK(y.dim() == 2 && y.size(0) == source.numel() && y.size(0) % top_k == 0, op, ": y_sorted ", shape(y),
                  " must have a row for each of source ", shape(source), ", a multiple of top_k = ", top_k);
  const int64_t hidden = y.size(1), tokens = y.size(0) / top_k;
  const std::vector<int64_t> position = Routing::positions(op, source);
  const std::optional<Tensor> factors = float_weights(op, weights, tokens, top_k);
  Tensor out = empty({tokens, hidden}, y.scalar_type());
  const Rows y_rows(y);
  run_parallel(moe_unpermute_kernel, tokens, hidden * top_k,
               MoeUnpermute{
                   .type = dtype_of(y, op, "y_sorted"),
                   .hidden = hidden,
                   .top_k = top_k,
                   .position = position.data(),
                   .y = y_rows,
                   .weights = data_or_null(factors),
                   .out = output_rows(out, writes_past_cache(bytes(y) + bytes(out))),
               });
  return out;
}

std::tuple<Tensor, Tensor> moe_unpermute_backward(const Tensor& grad, const std::optional<Tensor>& y,
                                                  const Tensor& source, const std::optional<Tensor>& weights,
                                                  int64_t top_k) {
  constexpr const char* op = "moe_unpermute_backward";
  check_top_k(op, top_k);
  MINDSPEED_CHECK(grad.dim() == 2 && grad.size(0) * top_k == source.numel(), op, ": grad ", shape(grad),
                  " must have a row for each top_k = ", top_k, " of source ", shape(source));
  MINDSPEED_CHECK(weights.has_value() == y.has_value(), op, ": y_sorted is needed with weights, and only with them");
  const int64_t tokens = grad.size(0), hidden = grad.size(1);
  if (y) {
    MINDSPEED_CHECK(y->dim() == 2 && y->size(0) == source.numel() && y->size(1) == hidden, op, ": y_sorted must be [",
                    source.numel(), ", ", hidden, "], but has shape ", shape(*y));
    MINDSPEED_CHECK(y->scalar_type() == grad.scalar_type(), op, ": grad must have the dtype of y_sorted, ",
                    y->scalar_type(), ", but has ", grad.scalar_type());
  }
  const std::vector<int64_t> position = Routing::positions(op, source);
  const std::optional<Tensor> factors = float_weights(op, weights, tokens, top_k);
  Tensor grad_y = empty({grad.size(0) * top_k, hidden}, grad.scalar_type());
  Tensor grad_weights = empty({weights ? tokens : 0, top_k}, ScalarType::Float);
  // Rows to which no assignment went keep their zeros.
  if (std::find(position.begin(), position.end(), -1) != position.end()) torch::stable::zero_(grad_y);
  const Rows grad_rows(grad), y_rows(y);
  run_parallel(moe_unpermute_backward_kernel, tokens, hidden * top_k,
               MoeUnpermuteBackward{
                   .type = dtype_of(grad, op, "grad"),
                   .hidden = hidden,
                   .top_k = top_k,
                   .position = position.data(),
                   .grad = grad_rows,
                   .y = y_rows,
                   .weights = data_or_null(factors),
                   .grad_y = output_rows(grad_y, writes_past_cache(bytes(grad) + 2 * bytes(grad_y))),
                   .grad_weights = weights ? grad_weights.mutable_data_ptr<float>() : nullptr,
               });
  return {grad_y, weights ? torch::stable::to(grad_weights, weights->scalar_type()) : grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("moe_permute", TORCH_BOX(&moe_permute));
  m.impl("moe_unpermute", TORCH_BOX(&moe_unpermute));
  m.impl("moe_unpermute_backward", TORCH_BOX(&moe_unpermute_backward));
}

}  // namespace mindspeed::cpu
