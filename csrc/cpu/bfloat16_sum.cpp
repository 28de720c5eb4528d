// torch.ops.mindspeed.add_to_bfloat16_sum_ on the CPU: sums of 24 bits in one byte more than their bfloat16 result.
#include "bfloat16_sum.h"

#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

constexpr const char* kOp = "add_to_bfloat16_sum_";

void check(const char* name, const Tensor& tensor, const Tensor& high, ScalarType dtype) {
  MINDSPEED_CHECK(same_shape(tensor, high) && tensor.scalar_type() == dtype && tensor.is_contiguous(), kOp, ": ", name,
                  " must be contiguous ", dtype, " ", shape(high), ", but is ", tensor.scalar_type(), " ",
                  shape(tensor));
}

void add_to_bfloat16_sum_(Tensor high, Tensor low, const Tensor& addend, bool last) {
  check("high", high, high, ScalarType::BFloat16);
  check("low", low, high, ScalarType::Byte);
  check("addend", addend, high, ScalarType::BFloat16);
  run_parallel(bfloat16_sum_kernel, high.numel(), 1,
               BFloat16Sum{
                   .high = static_cast<bfloat16*>(high.mutable_data_ptr()),
                   .low = low.mutable_data_ptr<uint8_t>(),
                   .addend = static_cast<const bfloat16*>(addend.const_data_ptr()),
                   .last = last,
               });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("add_to_bfloat16_sum_", TORCH_BOX(&add_to_bfloat16_sum_)); }

}  // namespace mindspeed::cpu
