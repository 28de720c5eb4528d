// Flash attention forward (Dao 2023, https://arxiv.org/abs/2307.08691): out = softmax(scale · q kᵀ) v over the visible
// keys, and the logsumexp of each query. Blocks of one cube core and two vector cores (__mix__(1, 2)).
//
// A block takes some queries of a head at a time and goes through their keys in tiles. The cube core multiplies, the
// vector cores take half of the queries each, and they meet in a workspace in global memory:
//   cube    S = q kᵀ of a tile, one tile ahead   → scores
//   vector  P = exp(S − maximum), masked          → probabilities
//   cube    P v                                   → products
//   vector  sums = sums · exp(old − new maximum) + P v
#pragma once

#include "common.h"
#include "flash_attention_scores.h"
#include "flash_attention_tiling.h"
#include "matmul.h"

namespace mindspeed::ascend {

// Flags between the cube core and its vector cores.
constexpr uint16_t kScoresReady = 0, kProbabilitiesReady = 1, kProductsReady = 2;

// Rows of a queue's buffer are not always filled to their end; what lies there is computed with, but goes nowhere.
__aicore__ inline void FillQueue(TQue<TPosition::VECIN, 1>& queue, int32_t count) {
  LocalTensor<float> local = queue.AllocTensor<float>();
  Duplicate(local, 0.0f, count);
  queue.FreeTensor(local);
}

// A workspace's parts.
template <class T>
struct AttentionWorkspace {
  GlobalTensor<float> scores, products;
  GlobalTensor<T> probabilities;

  __aicore__ inline void Init(GM_ADDR workspace, const AttentionTiling& tiling, int64_t block) {
    const GM_ADDR mine = workspace + block * tiling.workspace_bytes(sizeof(T));
    scores = GlobalOf<float>(mine, 2 * tiling.scores());
    products = GlobalOf<float>(mine + 8 * tiling.scores(), tiling.products());
    probabilities = GlobalOf<T>(mine + 8 * tiling.scores() + 4 * tiling.products(), tiling.scores());
  }
};

__aicore__ inline QueryBlock ReadQueryBlock(const GlobalTensor<int64_t>& blocks, int64_t index) {
  const int64_t at = index * 5;
  return {blocks.GetValue(at), blocks.GetValue(at + 1), blocks.GetValue(at + 2), blocks.GetValue(at + 3),
          blocks.GetValue(at + 4)};
}

// The products of a block's cube core.
template <class T>
class AttentionCube {
 public:
  __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR blocks, GM_ADDR workspace,
                              const AttentionTiling& tiling) {
    tiling_ = tiling;
    q_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(q));
    k_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(k));
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(v));
    blocks_ = GlobalOf<int64_t>(blocks, 5 * tiling.blocks);
    workspace_.Init(workspace, tiling, GetBlockIdx());
    matmul_.Init(pipe_);
  }

  __aicore__ inline void Process() {
    for (int64_t task = GetBlockIdx(); task < tiling_.blocks * tiling_.num_heads; task += GetBlockNum()) {
      const QueryBlock block = ReadQueryBlock(blocks_, task / tiling_.num_heads);
      const KeyRange keys(tiling_, block);
      const int64_t head = task % tiling_.num_heads, tiles = keys.tiles();
      if (tiles > 0) Scores(block, keys, head, 0);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        if (tile + 1 < tiles) Scores(block, keys, head, tile + 1);
        CrossCoreWaitFlag(kProbabilitiesReady);
        Products(block, keys, head, tile);
      }
    }
  }

 private:
  __aicore__ inline int64_t KeyValueHead(int64_t head) const {
    return head / (tiling_.num_heads / tiling_.num_kv_heads);
  }

  __aicore__ inline void Scores(const QueryBlock& block, const KeyRange& keys, int64_t head, int64_t tile) {
    const int64_t first = keys.begin + tile * kAttentionKeys, dim = tiling_.head_dim;
    const int64_t qStride = tiling_.num_heads * dim, kStride = tiling_.num_kv_heads * dim;
    const Operand<T> q{q_[block.query * qStride + head * dim], qStride, false};
    const Operand<T> k{k_[(block.key + first) * kStride + KeyValueHead(head) * dim], kStride, true};
    matmul_.Multiply(q, k, workspace_.scores[tile % 2 * tiling_.scores()], kAttentionKeys, int32_t(block.queries),
                     int32_t(smaller<int64_t>(kAttentionKeys, keys.end - first)), dim);
    CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
  }

  __aicore__ inline void Products(const QueryBlock& block, const KeyRange& keys, int64_t head, int64_t tile) {
    const int64_t first = keys.begin + tile * kAttentionKeys, dim = tiling_.value_dim;
    const int64_t stride = tiling_.num_kv_heads * dim;
    const Operand<T> p{workspace_.probabilities, kAttentionKeys, false};
    for (int64_t column = 0; column < dim; column += kTile) {
      const Operand<T> v{v_[(block.key + first) * stride + KeyValueHead(head) * dim + column], stride, false};
      matmul_.Multiply(p, v, workspace_.products[column], dim, int32_t(block.queries),
                       int32_t(smaller<int64_t>(kTile, dim - column)),
                       smaller<int64_t>(kAttentionKeys, keys.end - first));
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kProductsReady);
  }

  AttentionTiling tiling_;
  TPipe pipe_;
  Matmul<T> matmul_;
  AttentionWorkspace<T> workspace_;
  GlobalTensor<T> q_, k_, v_;
  GlobalTensor<int64_t> blocks_;
};

// The softmax of one of a block's vector cores.
template <class T>
class AttentionVector {
 public:
  __aicore__ inline void Init(GM_ADDR blocks, GM_ADDR sinks, GM_ADDR out, GM_ADDR logsumexp, GM_ADDR workspace,
                              const AttentionTiling& tiling) {
    tiling_ = tiling;
    sinks_ = GlobalOf<float>(sinks, tiling.num_heads);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out));
    logsumexp_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(logsumexp));
    blocks_ = GlobalOf<int64_t>(blocks, 5 * tiling.blocks);
    workspace_.Init(workspace, tiling, GetBlockIdx() / GetSubBlockNum());
    width_ = int32_t(round_up(tiling.value_dim, kRowElements));
    const int32_t rows = tiling.per_core, numbers = 8 * rows;
    pipe_.InitBuffer(scoresQueue_, 1, rows * kAttentionKeys * sizeof(float));
    pipe_.InitBuffer(probabilitiesQueue_, 1, rows * kAttentionKeys * sizeof(T));
    pipe_.InitBuffer(productsQueue_, 1, rows * width_ * sizeof(float));
    pipe_.InitBuffer(outQueue_, 1, rows * width_ * sizeof(T));
    pipe_.InitBuffer(logsumexpQueue_, 1, rows * sizeof(float));
    pipe_.InitBuffer(memory_, (rows * width_ + numbers + numbers + kFloatsPerBlock) * sizeof(float));
    sums_ = memory_.Get<float>();
    maximum_ = sums_[rows * width_], newMaximum_ = maximum_[rows], shrink_ = newMaximum_[rows];
    total_ = shrink_[rows], tileNumbers_ = total_[rows], temporaries_ = tileNumbers_[rows];
    factors_ = maximum_[numbers], ones_ = factors_[numbers];
    FillQueue(scoresQueue_, rows * kAttentionKeys);
    FillQueue(productsQueue_, rows * width_);
    Duplicate(tileNumbers_, 0.0f, rows);
    Duplicate(ones_, 1.0f, kFloatsPerBlock);
  }

  __aicore__ inline void Process() {
    for (int64_t task = GetBlockIdx() / GetSubBlockNum(); task < tiling_.blocks * tiling_.num_heads;
         task += GetBlockNum()) {
      const QueryBlock block = ReadQueryBlock(blocks_, task / tiling_.num_heads);
      const KeyRange keys(tiling_, block);
      const int64_t first = GetSubBlockIdx() * tiling_.per_core;
      const int32_t rows = int32_t(larger<int64_t>(0, smaller<int64_t>(tiling_.per_core, block.queries - first)));
      Start(task % tiling_.num_heads);
      for (int64_t tile = 0; tile < keys.tiles(); ++tile) {
        CrossCoreWaitFlag(kScoresReady);
        if (rows > 0) Softmax(block, keys, first, rows, tile);
        CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
        CrossCoreWaitFlag(kProductsReady);
        if (rows > 0) AddProducts(first, rows);
      }
      if (rows > 0) Finish(block, task % tiling_.num_heads, first, rows);
    }
  }

 private:
  __aicore__ inline int32_t Padded(int32_t rows) const { return int32_t(round_up(rows, kFloatsPerBlock)); }

  // A sink is a first logit, without a value.
  __aicore__ inline void Start(int64_t head) {
    const float sink = tiling_.has_sinks ? sinks_.GetValue(head) : kNoMaximum;
    const bool counts = sink > kNoMaximum;
    PipeBarrier<PIPE_V>();  // the task before this one still uses them
    Duplicate(sums_, 0.0f, tiling_.per_core * width_);
    Duplicate(maximum_, counts ? sink : kNoMaximum, tiling_.per_core);
    Duplicate(total_, counts ? 1.0f : 0.0f, tiling_.per_core);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Softmax(const QueryBlock& block, const KeyRange& keys, int64_t first, int32_t rows,
                                 int64_t tile) {
    const int64_t key = keys.begin + tile * kAttentionKeys;
    const int32_t columns = int32_t(smaller<int64_t>(kAttentionKeys, keys.end - key)), count = rows * kAttentionKeys;
    LocalTensor<float> scores = scoresQueue_.AllocTensor<float>();
    CopyRowsIn(scores, workspace_.scores[tile % 2 * tiling_.scores() + first * kAttentionKeys], rows, columns,
               kAttentionKeys, kAttentionKeys);
    scoresQueue_.EnQue(scores);
    scores = scoresQueue_.DeQue<float>();
    ScoresToLogits(tiling_, scores, ones_, count);
    MaskScores(tiling_, scores, block.position + first - key, rows, columns);
    for (int32_t r = 0; r < rows; ++r) {
      ReduceMax(tileNumbers_[r], scores[r * kAttentionKeys], factors_[r * kFloatsPerBlock], columns);
    }
    PipeBarrier<PIPE_V>();
    UpdateMaximum(Padded(rows));
    SubtractFromRows(scores, factors_, rows, kAttentionKeys);
    PipeBarrier<PIPE_V>();
    Exp(scores, scores, count);
    PipeBarrier<PIPE_V>();
    StoreProbabilities(scores, first, rows, columns);
    for (int32_t r = 0; r < rows; ++r) {
      ReduceSum(tileNumbers_[r], scores[r * kAttentionKeys], temporaries_, columns);
    }
    scoresQueue_.FreeTensor(scores);
    Mul(total_, total_, shrink_, Padded(rows));
    PipeBarrier<PIPE_V>();
    Add(total_, total_, tileNumbers_, Padded(rows));
    Broadcast(factors_, shrink_, Padded(rows));
    PipeBarrier<PIPE_V>();
    ScaleRows(sums_, factors_, rows, width_);
  }

  // Of tileNumbers: the new maximum of each row, its blocks in factors, and what the old sums are worth now in shrink.
  __aicore__ inline void UpdateMaximum(int32_t rows) {
    Max(newMaximum_, maximum_, tileNumbers_, rows);
    PipeBarrier<PIPE_V>();
    Sub(shrink_, maximum_, newMaximum_, rows);
    Broadcast(factors_, newMaximum_, rows);
    PipeBarrier<PIPE_V>();
    Exp(shrink_, shrink_, rows);
    Muls(maximum_, newMaximum_, 1.0f, rows);
  }

  __aicore__ inline void StoreProbabilities(const LocalTensor<float>& scores, int64_t first, int32_t rows,
                                            int32_t columns) {
    LocalTensor<T> probabilities = probabilitiesQueue_.template AllocTensor<T>();
    Narrow(probabilities, scores, rows * kAttentionKeys);
    probabilitiesQueue_.EnQue(probabilities);
    probabilities = probabilitiesQueue_.template DeQue<T>();
    CopyRowsOut(workspace_.probabilities[first * kAttentionKeys], probabilities, rows, columns, kAttentionKeys,
                kAttentionKeys);
    probabilitiesQueue_.FreeTensor(probabilities);
  }

  __aicore__ inline void AddProducts(int64_t first, int32_t rows) {
    LocalTensor<float> products = productsQueue_.AllocTensor<float>();
    CopyRowsIn(products, workspace_.products[first * tiling_.value_dim], rows, int32_t(tiling_.value_dim), width_,
               tiling_.value_dim);
    productsQueue_.EnQue(products);
    products = productsQueue_.DeQue<float>();
    PipeBarrier<PIPE_V>();
    Add(sums_, sums_, products, rows * width_);
    productsQueue_.FreeTensor(products);
  }

  // out = sums / total, logsumexp = maximum + ln(total). A row that has seen nothing has total 0: out 0, logsumexp −∞.
  __aicore__ inline void Finish(const QueryBlock& block, int64_t head, int64_t first, int32_t rows) {
    const int32_t numbers = Padded(rows);
    LocalTensor<float> logsumexp = logsumexpQueue_.AllocTensor<float>();
    Ln(logsumexp, total_, numbers);
    Maxs(shrink_, total_, 1e-30f, numbers);
    Duplicate(newMaximum_, 1.0f, numbers);
    PipeBarrier<PIPE_V>();
    Add(logsumexp, logsumexp, maximum_, numbers);
    Div(shrink_, newMaximum_, shrink_, numbers);
    PipeBarrier<PIPE_V>();
    Broadcast(factors_, shrink_, numbers);
    PipeBarrier<PIPE_V>();
    ScaleRows(sums_, factors_, rows, width_);
    PipeBarrier<PIPE_V>();
    LocalTensor<T> out = outQueue_.template AllocTensor<T>();
    Narrow(out, sums_, rows * width_);
    outQueue_.EnQue(out);
    logsumexpQueue_.EnQue(logsumexp);
    out = outQueue_.template DeQue<T>(), logsumexp = logsumexpQueue_.DeQue<float>();
    const int64_t row = block.query + first, stride = tiling_.num_heads * tiling_.value_dim;
    CopyRowsOut(out_[row * stride + head * tiling_.value_dim], out, rows, int32_t(tiling_.value_dim), width_, stride);
    CopyRowsOut(logsumexp_[head * tiling_.queries + row], logsumexp, 1, rows, numbers, rows);
    outQueue_.FreeTensor(out);
    logsumexpQueue_.FreeTensor(logsumexp);
  }

  AttentionTiling tiling_;
  int32_t width_;  // of a row of values in local memory
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> scoresQueue_, productsQueue_;
  TQue<TPosition::VECOUT, 1> probabilitiesQueue_, outQueue_, logsumexpQueue_;
  TBuf<TPosition::VECCALC> memory_;
  AttentionWorkspace<T> workspace_;
  GlobalTensor<T> out_;
  GlobalTensor<float> sinks_, logsumexp_;
  GlobalTensor<int64_t> blocks_;
  // Sums of values, and numbers of each row: its maximum, the next one, exp(old − new maximum), the sum of its
  // exponentials, something of the current tile. factors: numbers in blocks. A block of ones.
  LocalTensor<float> sums_, maximum_, newMaximum_, shrink_, total_, tileNumbers_, temporaries_, factors_, ones_;
};

// q [queries, num_heads, head_dim], k and v [keys, num_kv_heads, head_dim or value_dim], out [queries, num_heads,
// value_dim], logsumexp [num_heads, queries], blocks [blocks] of QueryBlock, sinks [num_heads] or none, workspace one
// per block of cores.
template <class T>
__aicore__ inline void FlashAttentionForward(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR blocks, GM_ADDR sinks,
                                             GM_ADDR out, GM_ADDR logsumexp, GM_ADDR workspace,
                                             const AttentionTiling& tiling) {
  if ASCEND_IS_AIC {
    AttentionCube<T> cube;
    cube.Init(q, k, v, blocks, workspace, tiling);
    cube.Process();
  } else {
    AttentionVector<T> vector;
    vector.Init(blocks, sinks, out, logsumexp, workspace, tiling);
    vector.Process();
  }
}

}  // namespace mindspeed::ascend
