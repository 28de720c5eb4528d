// What the feed-forward experts of a mixture hand to their kernels. Rows are assignments of tokens to experts, sorted
// by expert.
#pragma once

#include "common/dispatch.h"
#include "common/group_block.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// a(gate, up) = gate' σ(alpha · gate') · (up' + up_offset), where gate' = min(gate, limit), up' = clamp(up, ±limit).
struct GatedActivation {
  int64_t size;      // of gate and of up
  bool interleaved;  // a row holds gate and up in turn, not one after the other
  float alpha, limit, up_offset;
};

// z = x · gate_up + bias and h = weight · a(z). Items are blocks of h.
struct ExpertsForward {
  DType type;
  int64_t hidden;
  GatedActivation activation;
  const GroupBlock* blocks;
  InputRows x;            // [tokens, hidden]
  const int64_t* token;   // [rows]
  GroupMatrices gate_up;  // [experts] of [hidden, 2 · size]
  const float* bias;      // [experts, 2 · size] or nullptr
  const float* weight;    // [rows], of the assignment in its token's sum
  OutputRows z;           // [rows, 2 · size]
  OutputRows h;           // [rows, size]
};

// The gradients of z and of the weight, and h once more. Items are blocks of rows, columns are ignored.
struct ExpertsBackward {
  DType type;
  int64_t hidden;
  GatedActivation activation;
  const GroupBlock* blocks;
  InputRows grad;          // [tokens, hidden], of the token's sum
  const int64_t* token;    // [rows]
  GroupMatrices down;      // [experts] of [hidden, size]: the transpose of what forward multiplies by
  const float* down_bias;  // [experts, hidden] or nullptr
  const float* weight;     // [rows]
  InputRows z;             // [rows, 2 · size]
  OutputRows grad_z;       // [rows, 2 · size]
  OutputRows h;            // [rows, size]
  float* grad_weight;      // [rows]
};

// sums[e] = the sum over the rows of expert e of weight · x. Items are experts.
struct ExpertsBiasGradient {
  DType type;
  int64_t size;
  const int64_t* bounds;  // [experts + 1]
  InputRows x;
  const int64_t* index;  // [rows], where each row lies in x; nullptr if in order
  const float* weight;   // [rows] or nullptr
  float* sums;           // [experts, size]
};

MINDSPEED_KERNEL(fused_experts_forward_kernel, ExpertsForward)
MINDSPEED_KERNEL(fused_experts_backward_kernel, ExpertsBackward)
MINDSPEED_KERNEL(fused_experts_bias_gradient_kernel, ExpertsBiasGradient)

}  // namespace mindspeed::cpu
