// What the sorting of tokens by expert hands to its kernels.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

constexpr int64_t kMaxTopK = 64;

// sorted[r] = x[token of source[r]], or 0 where source[r] < 0. Items are sorted rows.
struct MoePermute {
  DType type;
  int64_t hidden, top_k;
  const int64_t* source;  // [rows]
  InputRows x;            // [tokens, hidden]
  OutputRows sorted;      // [rows, hidden]
};

// out[t] = the sum over j of weights[t, j] · y[position[t, j]]; a negative position adds nothing. Items are tokens.
struct MoeUnpermute {
  DType type;
  int64_t hidden, top_k;
  const int64_t* position;  // [tokens, top_k]
  InputRows y;              // [rows, hidden]
  const float* weights;     // [tokens, top_k], nullptr for ones
  OutputRows out;           // [tokens, hidden]
};

// grad_y[position[t, j]] = weights[t, j] · grad[t], and grad_weights[t, j] = grad[t] · y[position[t, j]]. Items are
// tokens.
struct MoeUnpermuteBackward {
  DType type;
  int64_t hidden, top_k;
  const int64_t* position;  // [tokens, top_k]
  InputRows grad;           // [tokens, hidden]
  InputRows y;              // [rows, hidden]
  const float* weights;     // [tokens, top_k], nullptr for ones
  OutputRows grad_y;        // [rows, hidden]
  float* grad_weights;      // [tokens, top_k], nullptr without weights
};

MINDSPEED_KERNEL(moe_permute_kernel, MoePermute)
MINDSPEED_KERNEL(moe_unpermute_kernel, MoeUnpermute)
MINDSPEED_KERNEL(moe_unpermute_backward_kernel, MoeUnpermuteBackward)

}  // namespace mindspeed::cpu
