// Flash attention forward (Dao 2023, https://arxiv.org/abs/2307.08691): out = softmax(scale · q kᵀ) v over the visible
// keys, and the logsumexp of each query. Blocks of one cube core and two vector cores (__mix__(1, 2)).
//
// A block takes some queries of a head at a time and goes through their keys in tiles. The cube core multiplies, the
// vector cores take half of the queries each, and they meet in a workspace in global memory:
//   cube    S = q kᵀ of a tile, one tile ahead   → scores
//   vector  P = exp(S − maximum), masked          → probabilities
//   cube    P v                                   → products
//   vector  sums = sums · exp(old − new maximum) + P v
// A vector core works on its queries in chunks, for which its queues have two buffers each: the next chunk is on its
// way in, and the last one on its way out, while one is computed with.
#pragma once

#include "common.h"
#include "flash_attention_scores.h"
#include "flash_attention_tiling.h"
#include "matmul.h"

namespace mindspeed::ascend {

// Flags between the cube core and its vector cores.
constexpr uint16_t kScoresReady = 0, kProbabilitiesReady = 1, kProductsReady = 2;

// Of what a vector core works on while the next chunk is copied in.
using ChunkQueue = TQue<TPosition::VECIN, 2>;

// Rows of a queue's buffers are not always filled to their end; what lies there is computed with, but goes nowhere.
__aicore__ inline void FillQueue(ChunkQueue& queue, int32_t count) {
  LocalTensor<float> first = queue.AllocTensor<float>(), second = queue.AllocTensor<float>();
  Duplicate(first, 0.0f, count);
  Duplicate(second, 0.0f, count);
  queue.FreeTensor(first);
  queue.FreeTensor(second);
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

// What a vector core takes of a task: some of the block's queries, `rows` from its row `first`.
struct VectorTask {
  QueryBlock block;
  KeyRange keys;
  int64_t head, first;
  int32_t rows;  // at most 0: nothing

  __aicore__ inline VectorTask(const AttentionTiling& tiling, const GlobalTensor<int64_t>& blocks, int64_t task)
      : block(ReadQueryBlock(blocks, task / tiling.num_heads)),
        keys(tiling, block),
        head(task % tiling.num_heads),
        first(GetSubBlockIdx() * tiling.rows.per_core),
        rows(int32_t(smaller<int64_t>(tiling.rows.per_core, block.queries - first))) {}

  __aicore__ inline int64_t Key(int64_t tile) const { return keys.begin + tile * kAttentionKeys; }
  __aicore__ inline int32_t Columns(int64_t tile) const {
    return int32_t(smaller<int64_t>(kAttentionKeys, keys.end - Key(tile)));
  }
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
    width_ = int32_t(round_up(tiling.value_dim, kRowElements)), chunk_ = tiling.rows.chunk;
    const int32_t rows = tiling.rows.per_core, numbers = 4 + kFloatsPerBlock;
    pipe_.InitBuffer(scoresQueue_, 2, chunk_ * kAttentionKeys * sizeof(float));
    pipe_.InitBuffer(probabilitiesQueue_, 2, chunk_ * kAttentionKeys * sizeof(T));
    pipe_.InitBuffer(productsQueue_, 2, chunk_ * width_ * sizeof(float));
    pipe_.InitBuffer(outQueue_, 2, chunk_ * width_ * sizeof(T));
    pipe_.InitBuffer(logsumexpQueue_, 2, chunk_ * sizeof(float));
    pipe_.InitBuffer(memory_, (rows * (width_ + 2) + chunk_ * numbers + kFloatsPerBlock) * sizeof(float));
    sums_ = memory_.Get<float>();
    maximum_ = sums_[rows * width_], total_ = maximum_[rows], newMaximum_ = total_[rows];
    shrink_ = newMaximum_[chunk_], tileNumbers_ = shrink_[chunk_], temporaries_ = tileNumbers_[chunk_];
    factors_ = temporaries_[chunk_], ones_ = factors_[chunk_ * kFloatsPerBlock];
    FillQueue(scoresQueue_, chunk_ * kAttentionKeys);
    FillQueue(productsQueue_, chunk_ * width_);
    Duplicate(tileNumbers_, 0.0f, chunk_);
    Duplicate(ones_, 1.0f, kFloatsPerBlock);
  }

  __aicore__ inline void Process() {
    for (int64_t index = GetBlockIdx() / GetSubBlockNum(); index < tiling_.blocks * tiling_.num_heads;
         index += GetBlockNum()) {
      const VectorTask task(tiling_, blocks_, index);
      const int64_t tiles = task.keys.tiles();
      Start(task.head);
      if (tiles > 0) AwaitScores(task, 0);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        Probabilities(task, tile);
        CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
        if (tile + 1 < tiles) AwaitScores(task, tile + 1);
        CrossCoreWaitFlag(kProductsReady);
        AddProducts(task);
      }
      Finish(task);
    }
  }

 private:
  __aicore__ inline int32_t Padded(int32_t rows) const { return int32_t(round_up(rows, kFloatsPerBlock)); }

  // Rows of the chunk that begins with this one.
  __aicore__ inline int32_t Rows(const VectorTask& task, int32_t row) const { return smaller(chunk_, task.rows - row); }

  // A sink is a first logit, without a value.
  __aicore__ inline void Start(int64_t head) {
    const float sink = tiling_.has_sinks ? sinks_.GetValue(head) : kNoMaximum;
    const bool counts = sink > kNoMaximum;
    PipeBarrier<PIPE_V>();  // the task before this one still uses them
    Duplicate(sums_, 0.0f, tiling_.rows.per_core * width_);
    Duplicate(maximum_, counts ? sink : kNoMaximum, tiling_.rows.per_core);
    Duplicate(total_, counts ? 1.0f : 0.0f, tiling_.rows.per_core);
    PipeBarrier<PIPE_V>();
  }

  // The cube core is one tile ahead: a tile's first chunk comes in while the tile before it is finished.
  __aicore__ inline void AwaitScores(const VectorTask& task, int64_t tile) {
    CrossCoreWaitFlag(kScoresReady);
    if (task.rows > 0) LoadScores(task, tile, 0);
  }

  __aicore__ inline void LoadScores(const VectorTask& task, int64_t tile, int32_t row) {
    LocalTensor<float> scores = scoresQueue_.AllocTensor<float>();
    CopyRowsIn(scores, workspace_.scores[tile % 2 * tiling_.scores() + (task.first + row) * kAttentionKeys],
               Rows(task, row), task.Columns(tile), kAttentionKeys, kAttentionKeys);
    scoresQueue_.EnQue(scores);
  }

  __aicore__ inline void Probabilities(const VectorTask& task, int64_t tile) {
    for (int32_t row = 0; row < task.rows; row += chunk_) {
      if (row + chunk_ < task.rows) LoadScores(task, tile, row + chunk_);
      Softmax(task, tile, row);
    }
  }

  // Of a chunk: stores its probabilities, and brings its maxima, totals and sums to their maxima with this tile.
  __aicore__ inline void Softmax(const VectorTask& task, int64_t tile, int32_t row) {
    const int32_t rows = Rows(task, row), columns = task.Columns(tile), count = rows * kAttentionKeys;
    const LocalTensor<float> total = total_[row];
    LocalTensor<float> scores = scoresQueue_.DeQue<float>();
    ScoresToLogits(tiling_, scores, ones_, count);
    MaskScores(tiling_, scores, task.block.position + task.first + row - task.Key(tile), rows, columns);
    for (int32_t r = 0; r < rows; ++r) {
      ReduceMax(tileNumbers_[r], scores[r * kAttentionKeys], factors_[r * kFloatsPerBlock], columns);
    }
    PipeBarrier<PIPE_V>();
    UpdateMaximum(maximum_[row], Padded(rows));
    SubtractFromRows(scores, factors_, rows, kAttentionKeys);
    PipeBarrier<PIPE_V>();
    Exp(scores, scores, count);
    PipeBarrier<PIPE_V>();
    StoreProbabilities(scores, task.first + row, rows, columns);
    for (int32_t r = 0; r < rows; ++r) {
      ReduceSum(tileNumbers_[r], scores[r * kAttentionKeys], temporaries_, columns);
    }
    scoresQueue_.FreeTensor(scores);
    Mul(total, total, shrink_, Padded(rows));
    PipeBarrier<PIPE_V>();
    Add(total, total, tileNumbers_, Padded(rows));
    Broadcast(factors_, shrink_, Padded(rows));
    PipeBarrier<PIPE_V>();
    ScaleRows(sums_[row * width_], factors_, rows, width_);
  }

  // Of tileNumbers: the new maximum of each row, its blocks in factors, and what the old sums are worth now in shrink.
  __aicore__ inline void UpdateMaximum(const LocalTensor<float>& maximum, int32_t rows) {
    Max(newMaximum_, maximum, tileNumbers_, rows);
    PipeBarrier<PIPE_V>();
    Sub(shrink_, maximum, newMaximum_, rows);
    Broadcast(factors_, newMaximum_, rows);
    PipeBarrier<PIPE_V>();
    Exp(shrink_, shrink_, rows);
    Muls(maximum, newMaximum_, 1.0f, rows);
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

  __aicore__ inline void LoadProducts(const VectorTask& task, int32_t row) {
    const int64_t dim = tiling_.value_dim;
    LocalTensor<float> products = productsQueue_.AllocTensor<float>();
    CopyRowsIn(products, workspace_.products[(task.first + row) * dim], Rows(task, row), int32_t(dim), width_, dim);
    productsQueue_.EnQue(products);
  }

  __aicore__ inline void AddProducts(const VectorTask& task) {
    if (task.rows <= 0) return;
    LoadProducts(task, 0);
    PipeBarrier<PIPE_V>();
    for (int32_t row = 0; row < task.rows; row += chunk_) {
      if (row + chunk_ < task.rows) LoadProducts(task, row + chunk_);
      LocalTensor<float> products = productsQueue_.DeQue<float>();
      Add(sums_[row * width_], sums_[row * width_], products, Rows(task, row) * width_);
      productsQueue_.FreeTensor(products);
    }
  }

  // out = sums / total, logsumexp = maximum + ln(total). A row that has seen nothing has total 0: out 0, logsumexp −∞.
  __aicore__ inline void Finish(const VectorTask& task) {
    for (int32_t row = 0; row < task.rows; row += chunk_) {
      const int32_t rows = Rows(task, row), numbers = Padded(rows);
      LocalTensor<float> logsumexp = logsumexpQueue_.AllocTensor<float>();
      Ln(logsumexp, total_[row], numbers);
      Maxs(shrink_, total_[row], 1e-30f, numbers);
      Duplicate(newMaximum_, 1.0f, numbers);
      PipeBarrier<PIPE_V>();
      Add(logsumexp, logsumexp, maximum_[row], numbers);
      Div(shrink_, newMaximum_, shrink_, numbers);
      PipeBarrier<PIPE_V>();
      Broadcast(factors_, shrink_, numbers);
      logsumexpQueue_.EnQue(logsumexp);
      PipeBarrier<PIPE_V>();
      ScaleRows(sums_[row * width_], factors_, rows, width_);
      PipeBarrier<PIPE_V>();
      Store(task, row, rows);
    }
  }

  __aicore__ inline void Store(const VectorTask& task, int32_t row, int32_t rows) {
    const int64_t at = task.block.query + task.first + row, dim = tiling_.value_dim, stride = tiling_.num_heads * dim;
    LocalTensor<T> out = outQueue_.template AllocTensor<T>();
    Narrow(out, sums_[row * width_], rows * width_);
    outQueue_.EnQue(out);
    out = outQueue_.template DeQue<T>();
    CopyRowsOut(out_[at * stride + task.head * dim], out, rows, int32_t(dim), width_, stride);
    outQueue_.FreeTensor(out);
    LocalTensor<float> logsumexp = logsumexpQueue_.DeQue<float>();
    CopyRowsOut(logsumexp_[task.head * tiling_.queries + at], logsumexp, 1, rows, Padded(rows), rows);
    logsumexpQueue_.FreeTensor(logsumexp);
  }

  AttentionTiling tiling_;
  int32_t width_, chunk_;  // of a row of values in local memory; rows of a chunk
  TPipe pipe_;
  ChunkQueue scoresQueue_, productsQueue_;
  TQue<TPosition::VECOUT, 1> probabilitiesQueue_, outQueue_, logsumexpQueue_;
  TBuf<TPosition::VECCALC> memory_;
  AttentionWorkspace<T> workspace_;
  GlobalTensor<T> out_;
  GlobalTensor<float> sinks_, logsumexp_;
  GlobalTensor<int64_t> blocks_;
  // Of each row: sums of values, its maximum, the sum of its exponentials. Of each row of a chunk: the next maximum,
  // exp(old − new maximum), something of the current tile; factors: numbers in blocks. A block of ones.
  LocalTensor<float> sums_, maximum_, total_, newMaximum_, shrink_, tileNumbers_, temporaries_, factors_, ones_;
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
