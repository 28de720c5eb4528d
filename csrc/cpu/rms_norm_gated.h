// What the gated RMSNorm operator hands to its kernels.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// y = x̂ · weight · a(gate) with x̂ = x · rstd, rstd = 1 / sqrt(mean(x²) + eps) and a = silu or the sigmoid. Items are
// rows.
struct RmsNormGatedForward {
  int64_t hidden;
  float eps;
  bool sigmoid;  // instead of silu
  DType type;
  InputRows x, gate;    // [rows, hidden]
  const float* weight;  // [hidden]
  OutputRows y;         // [rows, hidden]
  float* rstd;          // [rows]
};

// The gradients of x and gate, and each chunk's share of the weight's. Items are chunks of rows.
struct RmsNormGatedBackward {
  int64_t rows, rows_per_chunk, hidden;
  bool sigmoid;
  DType type;
  InputRows grad_y, x, gate;     // [rows, hidden]
  const float* weight;           // [hidden]
  const float* rstd;             // [rows]
  OutputRows grad_x, grad_gate;  // [rows, hidden]
  float* partial_weight;         // [chunks, hidden]
};

MINDSPEED_KERNEL(rms_norm_gated_forward_kernel, RmsNormGatedForward)
MINDSPEED_KERNEL(rms_norm_gated_backward_kernel, RmsNormGatedBackward)

}  // namespace mindspeed::cpu
