// What the gated delta rule's operators hand to their kernels.
//
// A head's state S [key_dim, value_dim] goes from token to token (q and k normalised first, if so asked):
//   S <- e^g S;  δ = β (v − Sᵀ k);  S <- S + k δᵀ;  out = scale · Sᵀ q
// where g is one number, or one for each row of S.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"
#include "common/sequence.h"

namespace mindspeed::cpu {

// A tensor [batch, seq, heads, dim]; the distances are in elements, along dim it is 1.
struct TokenHeads {
  const void* data = nullptr;
  int64_t batch = 0, token = 0, head = 0;
};

// A sequence, and where its states are among all sequences'.
struct DeltaRuleSequence {
  Sequence tokens;
  int64_t index;
  int64_t checkpoint;  // of its first one
};

struct DeltaRule {
  static constexpr int64_t kChunk = 64;                // tokens whose updates are computed together
  static constexpr int64_t kChunksPerCheckpoint = 16;  // and those between two states that forward keeps for backward

  DType type;                      // of q, k, v, the output and its gradient
  int64_t seq;                     // tokens of a batch entry
  int64_t key_heads, value_heads;  // neighbouring value heads share a key head
  int64_t key_dim, value_dim;
  float scale;
  bool l2norm;
  bool per_channel;  // there are key_dim decays of each value head and token, not one
  const DeltaRuleSequence* sequences;
  TokenHeads q, k, v;
  const float* g;              // [batch · seq, value_heads] or [batch · seq, value_heads, key_dim]
  const float* beta;           // [batch · seq, value_heads]
  const float* initial_state;  // [sequences, value_heads, key_dim, value_dim], or nullptr for zeros
};

// Items are, for each sequence, the key heads.
struct GatedDeltaRuleForward {
  DeltaRule problem;
  void* out;           // [batch · seq, value_heads, value_dim]
  float* final_state;  // as initial_state, or nullptr
  float* checkpoints;  // [.., value_heads, key_dim, value_dim]: of a sequence, the state before every
                       // kChunksPerCheckpoint chunks but the first
};

// The same items.
struct GatedDeltaRuleBackward {
  DeltaRule problem;
  int64_t longest;  // number of chunks of the longest sequence
  TokenHeads grad_out;
  const float* grad_final_state;  // as initial_state, or nullptr for zeros
  const float* checkpoints;
  void *grad_q, *grad_k;      // [batch · seq, key_heads, key_dim]
  void* grad_v;               // [batch · seq, value_heads, value_dim]
  float *grad_g, *grad_beta;  // as g and beta
  float* grad_initial_state;  // as initial_state, or nullptr
};

MINDSPEED_KERNEL(gated_delta_rule_forward_kernel, GatedDeltaRuleForward)
MINDSPEED_KERNEL(gated_delta_rule_backward_kernel, GatedDeltaRuleBackward)

}  // namespace mindspeed::cpu
