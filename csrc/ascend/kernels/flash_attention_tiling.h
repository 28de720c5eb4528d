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

// Rows of a block that each of its two vector cores takes, and how many of these it works on at a time.
struct AttentionRows {
  int32_t per_core, chunk;
};

struct AttentionTiling {
  int64_t num_heads, num_kv_heads, head_dim, value_dim;
  int64_t queries, blocks;  // rows of q; query blocks
  float scale, softcap;     // softcap: 0 for none
  bool causal, has_sinks;
  int64_t window;      // a query sees keys closer than this, or all (0)
  AttentionRows rows;  // queries, or keys where it is their gradients that are summed

  BOTH_SIDES constexpr int32_t per_block() const { return 2 * rows.per_core; }

  // Backward: two tiles of scores and of their gradients (float32), one of each in the tensors' type, of `element`
  // bytes; the products of both kinds.
  BOTH_SIDES constexpr int64_t gradient_products() const { return kAttentionKeys * larger(head_dim, value_dim); }
  BOTH_SIDES constexpr int64_t gradient_workspace_bytes(int64_t element) const {
    return (4 * 4 + element * 2) * kAttentionKeys * kAttentionKeys + 4 * 2 * gradient_products();
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

// Queries of a tile that a vector core takes where the gradients of keys are summed.
constexpr int32_t kGradientQueries = 64;

enum class AttentionKernel : int32_t { kForward, kQueryGradient, kKeyGradient };

// As many rows per core as leave room for two buffers of a chunk in each queue, then as large a chunk as they do, at
// most half of the rows: there is a next one. Zeros if a row is too long. The queues hold scores and products in
// float32 and what becomes of them in the tensors' type, of `element` bytes; beside them lie float32 sums and some
// numbers of every row.
inline AttentionRows attention_rows(AttentionKernel kernel, const AttentionTiling& tiling, int64_t element) {
  constexpr int64_t kMaxRows = 64, kMinRows = 16, kMinChunk = 8, kNumbers = 80;
  const int64_t key = round_up(tiling.head_dim, kRowElements), value = round_up(tiling.value_dim, kRowElements);
  const bool forward = kernel == AttentionKernel::kForward, ofKeys = kernel == AttentionKernel::kKeyGradient;
  const int64_t scores = forward ? kAttentionKeys : 2 * kAttentionKeys;  // with their gradients
  const int64_t products = forward ? value : ofKeys ? larger(key, value) : key;
  const int64_t sums = forward ? value : ofKeys ? key + value : key;
  for (int64_t rows = kMaxRows; rows >= kMinRows; rows /= 2) {
    for (int64_t chunk = rows / 2; chunk >= kMinChunk; chunk /= 2) {
      const int64_t queues = 2 * chunk * (scores + products) * (4 + element);
      if (queues + rows * (4 * sums + kNumbers) <= kUnifiedBufferBudget) return {int32_t(rows), int32_t(chunk)};
    }
  }
  return {0, 0};
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
