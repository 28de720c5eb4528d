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
  bool past_cache;  // write without reading into the cache; only where every vector of every row is aligned
};

struct RotaryAngles {
  const void* data;  // [batch or 1, seq, rotary_dim]
  int64_t batch_stride, seq_stride;
};

// Rotates queries and keys by their positions' angles. `transposed` multiplies by the transposes of the same matrices,
// which take the gradient of the output to the gradient of the input.
// Items are blocks of neighbouring positions of one sequence, for all heads.
struct Rotary {
  static constexpr int64_t kPositionsPerBlock = 8, kMaxRotaryDim = 1024;

  int64_t seq, blocks_per_sequence, head_dim, rotary_dim;
  bool interleaved, transposed;
  DType in_type, angle_type, out_type;
  RotaryHeads q, k;
  RotaryAngles cos, sin;
};

MINDSPEED_KERNEL(rotary_kernel, Rotary)

}  // namespace mindspeed::cpu
