// What the flash attention operators hand to their kernels.
#pragma once

#include <algorithm>

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// A tensor [batch, tokens, heads, dim]; packed sequences lie in a batch of one.
struct AttentionStrides {
  int64_t batch, token, head;  // in elements; along dim it is 1
};

struct AttentionInput {
  const void* data = nullptr;
  AttentionStrides strides = {};
};

struct AttentionSequence {
  int64_t batch;
  int64_t query_begin, query_length;  // tokens of the batch entry
  int64_t key_begin, key_length;
  int64_t offset;  // query i sits at key i + offset
};

// What forward and backward share.
struct AttentionProblem {
  DType type;  // of q, k, v, the output and its gradient
  int64_t num_heads, num_kv_heads, head_dim, value_dim;
  int64_t query_tokens;  // of a batch entry
  float scale;
  float softcap;  // 0: none
  bool causal;
  int64_t window;                  // kNoWindow: none
  int64_t query_block, key_block;  // how many queries and keys make a tile of scores, multiples of 32
  const AttentionSequence* sequences;
  AttentionInput q, k, v;

  static constexpr int64_t kNoWindow = int64_t{1} << 60;
};

// Half-open.
struct IndexRange {
  int64_t begin, end;
};

namespace {

inline IndexRange clip(IndexRange range, int64_t begin, int64_t end) {
  const int64_t first = std::clamp(range.begin, begin, end);
  return {first, std::clamp(range.end, first, end)};
}

// The keys that a query sees. Both ends grow with the query.
inline IndexRange visible_keys(const AttentionProblem& problem, const AttentionSequence& sequence, int64_t query) {
  const int64_t position = query + sequence.offset;
  const int64_t end = problem.causal ? position + 1 : position + problem.window;
  return clip({position - problem.window + 1, end}, 0, sequence.key_length);
}

// The queries that see any of the keys, and perhaps some that see none.
inline IndexRange visible_queries(const AttentionProblem& problem, const AttentionSequence& sequence, IndexRange keys) {
  const int64_t behind = problem.causal ? 0 : problem.window - 1;
  const IndexRange positions = {keys.begin - behind, keys.end - 1 + problem.window};
  return clip({positions.begin - sequence.offset, positions.end - sequence.offset}, 0, sequence.query_length);
}

}  // namespace

struct QueryBlock {
  int64_t sequence, begin;  // of queries in the sequence
};

// out = softmax(scores) · v and logsumexp, block by block of keys. Items are, for each head of k and v, the blocks of
// queries, with all heads of q that share it.
struct FlashAttentionForward {
  AttentionProblem problem;
  int64_t queries_per_item;  // a multiple of query_block, unless the sequence ends before
  int64_t num_blocks;
  const QueryBlock* blocks;
  const float* sinks;  // [num_heads], or nullptr
  void* out;           // [batch, query_tokens, num_heads, value_dim], contiguous
  float* logsumexp;    // [batch, num_heads, query_tokens], contiguous
};

// delta = Σ grad_out · out − grad_logsumexp, which each gradient of scores has in common with its row; and the sinks'
// gradient. Items are chunks of tokens, of all batch entries together.
struct FlashAttentionDelta {
  AttentionProblem problem;
  int64_t tokens, tokens_per_chunk;
  AttentionInput out, grad_out;
  const float* logsumexp;       // [batch, num_heads, query_tokens], contiguous
  const float* grad_logsumexp;  // the same, or nullptr
  const float* sinks;           // [num_heads], or nullptr
  float* delta;                 // [batch, num_heads, query_tokens]
  float* partial_sinks;         // [chunks, num_heads], or nullptr
};

struct AttentionTile {
  int64_t sequence, query_begin, key_begin;
};

// Adds to the gradients what the scores of queries_per_tile queries and key_block keys contribute. Items are, for
// each head of k and v, such tiles; no two of them share queries or keys.
struct FlashAttentionBackward {
  AttentionProblem problem;
  int64_t queries_per_tile;
  int64_t num_tiles;
  const AttentionTile* tiles;
  AttentionInput grad_out;
  const float* logsumexp;  // [batch, num_heads, query_tokens], contiguous
  const float* delta;      // the same
  float *grad_q, *grad_k, *grad_v;
  AttentionStrides grad_q_strides, grad_k_strides, grad_v_strides;
};

MINDSPEED_KERNEL(flash_attention_forward_kernel, FlashAttentionForward)
MINDSPEED_KERNEL(flash_attention_delta_kernel, FlashAttentionDelta)
MINDSPEED_KERNEL(flash_attention_backward_kernel, FlashAttentionBackward)

}  // namespace mindspeed::cpu
