// What the operator that adds to a sum of bfloat16 numbers hands to its kernel.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// Sums of 24 bits: the upper 16 bits of a float are kept where its rounding to bfloat16 will be, the next 8 beside it.
// Items are elements.
struct BFloat16Sum {
  bfloat16* high;
  uint8_t* low;
  const bfloat16* addend;
  bool last;  // round the sum to bfloat16; `low` is not needed any more
};

MINDSPEED_KERNEL(bfloat16_sum_kernel, BFloat16Sum)

}  // namespace mindspeed::cpu
