// What the causal convolution's operators hand to their kernels.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// pre[t, c] = bias[c] + Σ weight[d, c] · x[t − d, c] over the distances 0 <= d < width that stay in t's sequence.
struct CausalConv1d {
  int64_t tokens, channels, width;
  bool silu;  // y = silu(pre) instead of pre
  DType type;
  InputRows x;           // [tokens, channels]
  const int64_t* reach;  // [tokens]: the largest distance; -1 outside of all sequences, where y is 0
  const float* weight;   // [width, channels], by distance
  const float* bias;     // [channels]
};

// Items are blocks of tokens.
struct CausalConv1dForward {
  CausalConv1d problem;
  int64_t tokens_per_item;
  OutputRows y;  // [tokens, channels]
};

// The gradient of x, and each chunk's share of the gradients of weight and bias. Items are chunks of tokens.
struct CausalConv1dBackward {
  CausalConv1d problem;
  int64_t tokens_per_chunk;
  InputRows grad_y;   // [tokens, channels]
  OutputRows grad_x;  // [tokens, channels]
  float* partial;     // [chunks, width + 1, channels]: by distance, then the bias
};

MINDSPEED_KERNEL(causal_conv1d_forward_kernel, CausalConv1dForward)
MINDSPEED_KERNEL(causal_conv1d_backward_kernel, CausalConv1dBackward)

}  // namespace mindspeed::cpu
