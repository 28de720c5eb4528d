// What the rotary operator hands to its kernel.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

struct HeadStrides {
  int64_t batch, head, seq;  // in elements; along head_dim it is 1
};

struct RotaryHeads {
  int64_t count;
  const void* in;  // [batch, count, seq, head_dim]
  HeadStrides in_strides;
  void* out;  // the same shape
  HeadStrides out_strides;
};

struct RotaryAngles {
  const void*
      data;  // [batch or 1, seq, rotary_dim]; of the type of q if that is also the output's, else float32
  int64_t batch_stride, seq_stride;
};

// Rotates queries and keys by their positions' angles. `transposed` multiplies by the transpose of the same
// matrices, which takes the gradient of the output to the gradient of the input. Items are blocks of
// neighbouring positions of one sequence, for all heads, so that each angle is loaded once.
struct Rotary {
  static constexpr int64_t kPositionsPerBlock = 32;

  int64_t seq, blocks_per_sequence, head_dim, rotary_dim;
  bool interleaved, transposed;
  DType in_type, out_type;
  RotaryHeads q, k;
  RotaryAngles cos, sin;
};

MINDSPEED_KERNEL(rotary_kernel, Rotary)

}  // namespace mindspeed::cpu
