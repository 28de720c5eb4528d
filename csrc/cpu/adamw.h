// What the AdamW operator hands to its kernel.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// One parameter and what belongs to it, each `numel` elements in a row.
struct AdamWTensor {
  int64_t numel;
  DType param_type, grad_type;
  void* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  bfloat16* copy;  // gets the new parameter too; nullptr: nobody wants it
  bool copy_past_cache;
  float step_size;           // lr / (1 - beta1^step)
  float inverse_correction;  // 1 / sqrt(1 - beta2^step)
  uint32_t key[2];           // of this parameter's random numbers
};

// One step of AdamW over all tensors. Items are blocks of kAdamWBlock elements of the tensors laid end to end, so that
// threads get equal shares whatever the sizes of the parameters.
struct AdamWStep {
  const AdamWTensor* tensors;
  int64_t count;                                  // of tensors
  float decay;                                    // lr · weight_decay
  float beta2, weight_of_grad, weight_of_square;  // beta2, 1 - beta1, 1 - beta2
  float eps, grad_scale;
  bool stochastic_rounding;  // of bfloat16 parameters
};

constexpr int64_t kAdamWBlock = 4096;

MINDSPEED_KERNEL(adamw_step_kernel, AdamWStep)

}  // namespace mindspeed::cpu
