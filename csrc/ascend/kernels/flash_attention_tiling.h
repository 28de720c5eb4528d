// What the flash attention kernels are given besides their tensors.
#pragma once

#include "tiling.h"

namespace mindspeed::ascend {

constexpr int32_t kAttentionKeys = 128;  // of a tile

// Some neighbouring queries of one sequence and the keys of that sequence.
struct QueryBlock {
  int64_t query, queries;  // the first one's row, and how many
  int64_t key, keys;       // those of the sequence
  int64_t position;        // the key at which the first query sits
};

struct AttentionTiling {
  int64_t num_heads, num_kv_heads, head_dim, value_dim;
  int64_t queries, blocks;  // rows of q; query blocks
  float scale, softcap;     // softcap: 0 for none
  bool causal, has_sinks;
  int64_t window;    // a query sees keys closer than this, or all (0)
  int32_t per_core;  // queries of a block that one of its two vector cores takes

  BOTH_SIDES constexpr int32_t per_block() const { return 2 * per_core; }

  // Backward: two tiles of float32 and two of the tensors' type, of `element` bytes; the products of both kinds.
  BOTH_SIDES constexpr int64_t gradient_products() const { return kAttentionKeys * larger(head_dim, value_dim); }
  BOTH_SIDES constexpr int64_t gradient_workspace_bytes(int64_t element) const {
    return (4 * 2 + element * 2) * kAttentionKeys * kAttentionKeys + 4 * 2 * gradient_products();
  }

  // Forward. Elements of one block's workspace: two tiles of scores, one of products (float32); one of probabilities.
  BOTH_SIDES constexpr int64_t scores() const { return per_block() * kAttentionKeys; }
  BOTH_SIDES constexpr int64_t products() const { return per_block() * value_dim; }
  BOTH_SIDES constexpr int64_t workspace_bytes(int64_t element) const {
    return 4 * (2 * scores() + products()) + element * scores();
  }
};

// Some neighbouring keys of one sequence and the queries of that sequence, for the gradients of keys and values.
struct KeyBlock {
  int64_t key, keys;       // the first one's row, and how many
  int64_t index;           // the first one's index in its sequence
  int64_t query, queries;  // those of the sequence
  int64_t position;        // the key at which the sequence's first query sits
};

// The queries that see at least one key of the block.
struct QueryRange {
  int64_t begin, end;

  BOTH_SIDES constexpr QueryRange(const AttentionTiling& tiling, const KeyBlock& block) : begin(0), end(block.queries) {
    const int64_t first = block.index - block.position, last = first + block.keys - 1;
    if (tiling.window > 0) begin = larger<int64_t>(begin, first - tiling.window + 1);
    if (tiling.causal) begin = larger(begin, first);
    if (tiling.window > 0) end = smaller(end, last + tiling.window);
  }
};

// 64 queries per vector core, or 32 where values are so long that their sums would not fit; 0 if those do not fit.
// `element`: the bytes of one of the tensors.
inline int32_t attention_queries(int64_t value_dim, int64_t element) {
  for (const int64_t queries : {64, 32}) {
    const int64_t width = round_up(value_dim, kRowElements);
    const int64_t tile = queries * kAttentionKeys * (4 + element), sums = queries * width * (4 + 4 + element),
                  numbers = queries * 64;
    if (tile + sums + numbers <= kUnifiedBufferBudget) return int32_t(queries);
  }
  return 0;
}

// Backward: 32 queries per vector core, and as many keys of a block as leave room for their sums; 0 if none do.
constexpr int32_t kGradientQueries = 32;

inline int32_t attention_gradient_keys(int64_t head_dim, int64_t value_dim, int64_t element) {
  const int64_t key = round_up(head_dim, kRowElements), value = round_up(value_dim, kRowElements);
  const int64_t tiles = kGradientQueries * kAttentionKeys * (2 * 4 + 2 * element);
  if (tiles + kGradientQueries * key * (4 + 4 + element) > kUnifiedBufferBudget) return 0;  // the sums of grad_q
  for (const int64_t keys : {64, 32, 16}) {
    const int64_t sums = 4 * (key + value) + (4 + element) * larger(key, value);
    if (tiles + keys * sums <= kUnifiedBufferBudget) return int32_t(keys);
  }
  return 0;
}

// The keys that at least one query of the block sees.
struct KeyRange {
  int64_t begin, end;

  BOTH_SIDES constexpr KeyRange(const AttentionTiling& tiling, const QueryBlock& block) : begin(0), end(block.keys) {
    const int64_t last = block.position + block.queries - 1;
    if (tiling.causal) end = smaller(end, last + 1);
    if (tiling.window > 0) {
      begin = larger<int64_t>(begin, block.position - tiling.window + 1);
      end = smaller(end, last + tiling.window);
    }
  }

  BOTH_SIDES constexpr int64_t tiles() const { return end > begin ? ceil_div(end - begin, kAttentionKeys) : 0; }
};

}  // namespace mindspeed::ascend
