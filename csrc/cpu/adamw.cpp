// torch.ops.mindspeed.adamw_step_ on the CPU.
//
// The floor is memory traffic: 28 bytes an element in float32, of which the parameter and the two moments are read and
// written and the gradient is read. Clipping adds nothing to it, and the bfloat16 copy 2 bytes.
#include "adamw.h"

#include <cmath>

#include "common/cache.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

constexpr const char* kOp = "adamw_step_";
using Tensors = std::vector<Tensor>;

void check_count(const char* name, size_t count, const Tensors& params) {
  MINDSPEED_CHECK(count == params.size(), kOp, ": ", name, " must have an entry for each of the ", params.size(),
                  " params, but has ", count);
}

// The i-th tensor of a list must have the shape of its parameter and lie in memory element after element.
void check_tensor(const char* name, const Tensors& tensors, const Tensors& params, size_t i, bool contiguous = true) {
  MINDSPEED_CHECK(same_shape(tensors[i], params[i]), kOp, ": ", name, "[", i, "] must have the shape of params[", i,
                  "] ", shape(params[i]), ", but has ", shape(tensors[i]));
  MINDSPEED_CHECK(!contiguous || tensors[i].is_contiguous(), kOp, ": ", name, "[", i, "] must be contiguous");
}

void check_dtype(const char* name, const Tensors& tensors, size_t i, ScalarType wanted) {
  MINDSPEED_CHECK(tensors[i].scalar_type() == wanted, kOp, ": ", name, "[", i, "] must be ", wanted, ", but is ",
                  tensors[i].scalar_type());
}

// Scrambles 64 bits (the finalizer of SplitMix64): neighbouring seeds give unrelated keys.
uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void adamw_step_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies,
                 std::vector<int64_t> steps, double lr, double beta1, double beta2, double eps, double weight_decay,
                 double grad_scale, std::optional<int64_t> rounding_seed) {
  check_count("grads", grads.size(), params);
  check_count("exp_avgs", exp_avgs.size(), params);
  check_count("exp_avg_sqs", exp_avg_sqs.size(), params);
  check_count("steps", steps.size(), params);
  if (!copies.empty()) check_count("copies", copies.size(), params);

  int64_t elements = 0, touched = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    check_tensor("params", params, params, i);
    check_tensor("grads", grads, params, i, false);
    check_tensor("exp_avgs", exp_avgs, params, i);
    check_tensor("exp_avg_sqs", exp_avg_sqs, params, i);
    check_dtype("exp_avgs", exp_avgs, i, ScalarType::Float);
    check_dtype("exp_avg_sqs", exp_avg_sqs, i, ScalarType::Float);
    if (params[i].scalar_type() != ScalarType::BFloat16) check_dtype("params", params, i, ScalarType::Float);
    if (!copies.empty()) {
      check_tensor("copies", copies, params, i);
      check_dtype("copies", copies, i, ScalarType::BFloat16);
      check_dtype("params", params, i, ScalarType::Float);  // of a bfloat16 parameter a copy would be the parameter
    }
    MINDSPEED_CHECK(steps[i] >= 1, kOp, ": steps[", i, "] must count this step, the first being 1, but is ", steps[i]);
    elements += params[i].numel();
    touched += bytes(params[i]) + bytes(grads[i]) + bytes(exp_avgs[i]) + bytes(exp_avg_sqs[i]);
  }

  const bool past_cache = writes_past_cache(touched);
  std::vector<AdamWTensor> tensors;
  tensors.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    if (!grads[i].is_contiguous()) grads[i] = torch::stable::contiguous(grads[i]);
    void* copy = copies.empty() ? nullptr : copies[i].mutable_data_ptr();
    const uint64_t key = scramble(static_cast<uint64_t>(rounding_seed.value_or(0)) + (i + 1) * 0x9e3779b97f4a7c15u);
    tensors.push_back({
        .numel = params[i].numel(),
        .param_type = dtype_of(params[i], kOp, "params"),
        .grad_type = dtype_of(grads[i], kOp, "grads"),
        .param = params[i].mutable_data_ptr(),
        .grad = grads[i].const_data_ptr(),
        .exp_avg = exp_avgs[i].mutable_data_ptr<float>(),
        .exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr<float>(),
        .copy = static_cast<bfloat16*>(copy),
        .copy_past_cache = past_cache && reinterpret_cast<uintptr_t>(copy) % 64 == 0,
        .step_size = static_cast<float>(lr / (1 - std::pow(beta1, steps[i]))),
        .inverse_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, steps[i]))),
        .key = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
    });
  }
  run_parallel(adamw_step_kernel, (elements + kAdamWBlock - 1) / kAdamWBlock, kAdamWBlock,
               AdamWStep{
                   .tensors = tensors.data(),
                   .count = static_cast<int64_t>(tensors.size()),
                   .decay = static_cast<float>(lr * weight_decay),
                   .beta2 = static_cast<float>(beta2),
                   .weight_of_grad = static_cast<float>(1 - beta1),
                   .weight_of_square = static_cast<float>(1 - beta2),
                   .eps = static_cast<float>(eps),
                   .grad_scale = static_cast<float>(grad_scale),
                   .stochastic_rounding = rounding_seed.has_value(),
               });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("adamw_step_", TORCH_BOX(&adamw_step_)); }

}  // namespace mindspeed::cpu
