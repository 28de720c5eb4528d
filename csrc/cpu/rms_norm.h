// What the RMSNorm operator hands to its kernels.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// y = x̂ · weight with x̂ = x · rstd and rstd = 1 / sqrt(mean(x²) + eps). Items are rows.
struct RmsNormForward {
  int64_t hidden;
  float eps;
  bool round_before_weight;  // x̂ is rounded to x's type before it meets the weight
  DType x_type, y_type;
  InputRows x;         // [rows, hidden]
  InputRows residual;  // [rows, hidden] of x's type, added to x first; optional
  OutputRows sum;      // [rows, hidden]: x + residual, if there is a residual
  const float* weight;
  OutputRows y;  // [rows, hidden]
  float* rstd;   // [rows]
};

// The gradient of x (of both x and residual, when x is their sum) and each chunk's share of the weight's gradient.
// Items are chunks of rows. Their number is a function of the shape alone, and so is the order of every addition.
struct RmsNormBackward {
  int64_t rows, rows_per_chunk, hidden;
  bool round_before_weight;
  DType x_type, y_type;
  InputRows grad_y;    // [rows, hidden]
  InputRows grad_sum;  // [rows, hidden] of x's type: what else flows into x; optional
  InputRows x;         // [rows, hidden]
  const float* weight;
  const float* rstd;      // [rows]
  OutputRows grad_x;      // [rows, hidden]
  float* partial_weight;  // [chunks, hidden]; nullptr: the weight needs no gradient
};

MINDSPEED_KERNEL(rms_norm_forward_kernel, RmsNormForward)
MINDSPEED_KERNEL(rms_norm_backward_kernel, RmsNormBackward)

}  // namespace mindspeed::cpu
