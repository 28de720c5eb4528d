// torch.ops.mindspeed.cross_entropy_ on the CPU.
//
// A row stays in the second-level cache while it is read three times and written once, so that all costs what one
// reading and one writing of the logits cost.
#include "cross_entropy.h"

#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

constexpr const char* kOp = "cross_entropy_";

Tensor cross_entropy_(Tensor logits, const Tensor& targets, const std::optional<Tensor>& weight, int64_t ignore_index,
                      std::optional<double> softcap, double label_smoothing, double z_loss) {
  MINDSPEED_CHECK(logits.dim() == 2, kOp, ": logits must be [tokens, vocabulary], but are ", shape(logits));
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  MINDSPEED_CHECK(logits.stride(1) == 1 || vocabulary <= 1, kOp, ": rows of logits must be contiguous");
  MINDSPEED_CHECK(targets.dim() == 1 && targets.size(0) == rows && targets.scalar_type() == ScalarType::Long, kOp,
                  ": targets must be int64 [", rows, "], but are ", targets.scalar_type(), " ", shape(targets));
  MINDSPEED_CHECK(!weight || (same_shape(*weight, targets) && weight->scalar_type() == ScalarType::Float), kOp,
                  ": weight must be float32 [", rows, "]");
  const Tensor dense_targets = torch::stable::contiguous(targets);
  const int64_t* target = dense_targets.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r)
    MINDSPEED_CHECK(target[r] == ignore_index || (0 <= target[r] && target[r] < vocabulary), kOp, ": targets[", r,
                    "] is ", target[r], ", which is neither in [0, ", vocabulary, ") nor ignore_index ", ignore_index);

  Tensor loss = torch::stable::empty({rows}, ScalarType::Float);
  const std::optional<Tensor> dense_weight = weight ? std::optional(torch::stable::contiguous(*weight)) : std::nullopt;
  run_parallel(cross_entropy_kernel, rows, vocabulary,
               CrossEntropyRows{
                   .vocabulary = vocabulary,
                   .type = dtype_of(logits, kOp, "logits"),
                   .logits = logits.mutable_data_ptr(),
                   .stride = logits.stride(0),
                   .targets = target,
                   .ignore_index = ignore_index,
                   .softcap = static_cast<float>(softcap.value_or(0.0)),
                   .smoothing = static_cast<float>(label_smoothing),
                   .z_loss = static_cast<float>(z_loss),
                   .weight = dense_weight ? dense_weight->const_data_ptr<float>() : nullptr,
                   .loss = loss.mutable_data_ptr<float>(),
               });
  return loss;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("cross_entropy_", TORCH_BOX(&cross_entropy_)); }

}  // namespace mindspeed::cpu
