// The two kernels of flash attention's gradient: what their cores go through. flash_attention_backward.h has what they
// do on the way.
//
// Arguments as in forward; delta is float32 [num_heads, queries], and logsumexp is +∞ where a query sees nothing, so
// that its probabilities are 0.
#pragma once

#include "flash_attention_backward.h"

namespace mindspeed::ascend {

// The tiles of keys that the queries of a task see.
class QueryTask {
 public:
  __aicore__ inline QueryTask(const AttentionTiling& tiling, const GlobalTensor<int64_t>& blocks, int64_t task)
      : block_(ReadQueryBlock(blocks, task / tiling.num_heads)),
        keys_(tiling, block_),
        head_(task % tiling.num_heads),
        group_(tiling.num_heads / tiling.num_kv_heads) {}

  __aicore__ inline const QueryBlock& Block() const { return block_; }
  __aicore__ inline int64_t Head() const { return head_; }
  __aicore__ inline int64_t Tiles() const { return keys_.tiles(); }

  __aicore__ inline GradientTile Tile(int64_t tile) const {
    const int64_t key = keys_.begin + tile * kAttentionKeys;
    GradientTile at;
    at.query = block_.query, at.queries = int32_t(block_.queries);
    at.key = block_.key + key, at.keys = int32_t(smaller<int64_t>(kAttentionKeys, keys_.end - key));
    at.head = head_, at.kvHead = head_ / group_;
    at.position = block_.position - key, at.half = tile % 2;
    return at;
  }

 private:
  QueryBlock block_;
  KeyRange keys_;
  int64_t head_, group_;
};

// The tiles of queries, of all heads that share a key-value head, that see the keys of a task.
class KeyTask {
 public:
  __aicore__ inline KeyTask(const AttentionTiling& tiling, const GlobalTensor<int64_t>& blocks, int64_t task)
      : block_(Read(blocks, task / tiling.num_kv_heads)),
        queries_(tiling, block_),
        head_(task % tiling.num_kv_heads),
        group_(tiling.num_heads / tiling.num_kv_heads) {
    constexpr int64_t kQueries = 2 * kGradientQueries;
    tiles_ = queries_.end > queries_.begin ? ceil_div(queries_.end - queries_.begin, kQueries) : 0;
  }

  __aicore__ inline const KeyBlock& Block() const { return block_; }
  __aicore__ inline int64_t Head() const { return head_; }
  __aicore__ inline int64_t Tiles() const { return tiles_ * group_; }

  __aicore__ inline GradientTile Tile(int64_t tile) const {
    constexpr int64_t kQueries = 2 * kGradientQueries;
    const int64_t query = queries_.begin + tile % tiles_ * kQueries;
    GradientTile at;
    at.query = block_.query + query, at.queries = int32_t(smaller<int64_t>(kQueries, queries_.end - query));
    at.key = block_.key, at.keys = int32_t(block_.keys);
    at.head = head_ * group_ + tile / tiles_, at.kvHead = head_;
    at.position = block_.position + query - block_.index, at.half = tile % 2;
    return at;
  }

 private:
  __aicore__ inline static KeyBlock Read(const GlobalTensor<int64_t>& blocks, int64_t index) {
    const int64_t at = index * 6;
    return {blocks.GetValue(at),     blocks.GetValue(at + 1), blocks.GetValue(at + 2),
            blocks.GetValue(at + 3), blocks.GetValue(at + 4), blocks.GetValue(at + 5)};
  }

  KeyBlock block_;
  QueryRange queries_;
  int64_t head_, group_, tiles_;
};

// grad_q. blocks: [tiling.blocks] of QueryBlock, of at most tiling.per_block() queries.
template <class T>
__aicore__ inline void FlashAttentionQueryGradient(const GradientArguments& a, const AttentionTiling& tiling) {
  const int64_t tasks = tiling.blocks * tiling.num_heads, dim = tiling.head_dim;
  const GlobalTensor<int64_t> blocks = GlobalOf<int64_t>(a.blocks, 5 * tiling.blocks);
  if ASCEND_IS_AIC {
    GradientCube<T> cube;
    cube.Init(a, tiling);
    for (int64_t index = GetBlockIdx(); index < tasks; index += GetBlockNum()) {
      const QueryTask task(tiling, blocks, index);
      for (int64_t tile = 0; tile < task.Tiles(); ++tile) {
        cube.Scores(task, tile);
        cube.QueryProducts(task.Tile(tile));
      }
    }
  } else {
    GradientVector<T> vector;
    vector.Init(a, tiling, tiling.rows.per_core, dim, 0);
    GlobalTensor<T> gradQ;
    gradQ.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.gradQ));
    const int64_t stride = tiling.num_heads * dim, first = GetSubBlockIdx() * tiling.rows.per_core;
    for (int64_t index = GetBlockIdx() / GetSubBlockNum(); index < tasks; index += GetBlockNum()) {
      const QueryTask task(tiling, blocks, index);
      const int32_t rows = int32_t(smaller<int64_t>(tiling.rows.per_core, task.Block().queries - first));
      vector.Start();
      for (int64_t tile = 0; tile < task.Tiles(); ++tile) {
        vector.Softmax(task, tile);
        if (rows > 0) vector.AddFirst(first, rows, dim);
      }
      if (rows > 0)
        vector.StoreFirst(gradQ[(task.Block().query + first) * stride + task.Head() * dim], rows, dim, stride);
    }
  }
}

// grad_k and grad_v. blocks: [tiling.blocks] of KeyBlock, of at most tiling.per_block() keys.
template <class T>
__aicore__ inline void FlashAttentionKeyGradient(const GradientArguments& a, const AttentionTiling& tiling) {
  const int64_t tasks = tiling.blocks * tiling.num_kv_heads, keyDim = tiling.head_dim, valueDim = tiling.value_dim;
  const GlobalTensor<int64_t> blocks = GlobalOf<int64_t>(a.blocks, 6 * tiling.blocks);
  if ASCEND_IS_AIC {
    GradientCube<T> cube;
    cube.Init(a, tiling);
    for (int64_t index = GetBlockIdx(); index < tasks; index += GetBlockNum()) {
      const KeyTask task(tiling, blocks, index);
      for (int64_t tile = 0; tile < task.Tiles(); ++tile) {
        cube.Scores(task, tile);
        cube.KeyProducts(task.Tile(tile));
      }
    }
  } else {
    GradientVector<T> vector;
    vector.Init(a, tiling, kGradientQueries, keyDim, valueDim);
    GlobalTensor<T> gradK, gradV;
    gradK.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.gradK));
    gradV.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.gradV));
    const int64_t keyStride = tiling.num_kv_heads * keyDim, valueStride = tiling.num_kv_heads * valueDim;
    const int64_t first = GetSubBlockIdx() * tiling.rows.per_core;
    for (int64_t index = GetBlockIdx() / GetSubBlockNum(); index < tasks; index += GetBlockNum()) {
      const KeyTask task(tiling, blocks, index);
      const int32_t rows = int32_t(smaller<int64_t>(tiling.rows.per_core, task.Block().keys - first));
      vector.Start();
      for (int64_t tile = 0; tile < task.Tiles(); ++tile) {
        vector.Softmax(task, tile);
        if (rows <= 0) continue;
        vector.AddFirst(first, rows, keyDim);
        vector.AddSecond(first, rows, valueDim);
      }
      if (rows <= 0) continue;
      const int64_t key = task.Block().key + first;
      vector.StoreFirst(gradK[key * keyStride + task.Head() * keyDim], rows, keyDim, keyStride);
      vector.StoreSecond(gradV[key * valueStride + task.Head() * valueDim], rows, valueDim, valueStride);
    }
  }
}

}  // namespace mindspeed::ascend
