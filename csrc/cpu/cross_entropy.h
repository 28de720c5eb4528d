// What the cross-entropy operator hands to its kernel.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// With y = softcap · tanh(x / softcap), or y = x without a softcap, and lse = log(sum(e^y)), a row's loss is
//   lse − (1 − smoothing) · y[target] − smoothing · mean(y) + z_loss · lse²,
// and 0 if its target is ignore_index. Where `weight` is given, the logits x are overwritten by weight times the
// gradient of the row's loss with respect to them. Items are rows.
struct CrossEntropyRows {
  int64_t vocabulary;
  DType type;
  void* logits;  // [rows, vocabulary]
  int64_t stride;
  const int64_t* targets;  // [rows]
  int64_t ignore_index;
  float softcap;  // 0: none
  float smoothing, z_loss;
  const float* weight;  // [rows]; nullptr: only the losses are wanted
  float* loss;          // [rows]
};

MINDSPEED_KERNEL(cross_entropy_kernel, CrossEntropyRows)

}  // namespace mindspeed::cpu
