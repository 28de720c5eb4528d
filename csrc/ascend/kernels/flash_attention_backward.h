// Flash attention backward. With p = exp(scale · q kᵀ − logsumexp) and delta = Σ grad_out · out − grad_logsumexp of
// each query:
//   ds = scale · p · (grad_out vᵀ − delta)    grad_q = ds k    grad_k = dsᵀ q    grad_v = pᵀ grad_out
// and ds times 1 − tanh² where logits are softcap · tanh(scale · q kᵀ / softcap).
// Blocks of one cube core and two vector cores (__mix__(1, 2)).
//
// Two kernels go over the same tiles: one along the keys of some queries, which sums grad_q, and one along the queries
// of some keys, which sums grad_k and grad_v. That computes scores twice, but no two cores add to the same place: the
// results do not depend on their order. In a tile the cores meet three times:
//   cube    scores = q kᵀ, gradients = grad_out vᵀ, one tile ahead
//   vector  p and ds, chunk by chunk as in forward
//   cube    their products
//   vector  adds them up
#pragma once

#include "flash_attention.h"

namespace mindspeed::ascend {

template <class T>
struct GradientWorkspace {
  static constexpr int64_t kSize = kAttentionKeys * kAttentionKeys;

  GlobalTensor<float> scores, gradients;  // of two tiles
  GlobalTensor<float> first, second;      // products: grad_q or grad_k, and grad_v
  GlobalTensor<T> probabilities, scoreGradients;

  __aicore__ inline void Init(GM_ADDR workspace, const AttentionTiling& tiling, int64_t block) {
    const int64_t products = tiling.gradient_products();
    GM_ADDR at = workspace + block * tiling.gradient_workspace_bytes(sizeof(T));
    scores = GlobalOf<float>(at, 2 * kSize), gradients = GlobalOf<float>(at + 8 * kSize, 2 * kSize);
    at += 16 * kSize;
    first = GlobalOf<float>(at, products), second = GlobalOf<float>(at + 4 * products, products);
    at += 8 * products;
    probabilities = GlobalOf<T>(at, kSize), scoreGradients = GlobalOf<T>(at + sizeof(T) * kSize, kSize);
  }
};

// The tensors of a call.
struct GradientArguments {
  GM_ADDR q, k, v, gradOut, logsumexp, delta, blocks, gradQ, gradK, gradV, workspace;
};

// A tile: queries and keys by the rows of their first ones.
struct GradientTile {
  int64_t query, key;
  int32_t queries, keys;
  int64_t head, kvHead;
  int64_t position;  // the key of the tile at which its first query sits
  int64_t half;      // of the workspace for scores
};

template <class T>
class GradientCube {
 public:
  __aicore__ inline void Init(const GradientArguments& a, const AttentionTiling& tiling) {
    tiling_ = tiling;
    q_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.q));
    k_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.k));
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.v));
    gradOut_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a.gradOut));
    workspace_.Init(a.workspace, tiling, GetBlockIdx());
    matmul_.Init(pipe_);
  }

  // The scores of the tile after this one, and before the first tile its own: the vector cores are one tile behind.
  template <class Task>
  __aicore__ inline void Scores(const Task& task, int64_t tile) {
    if (tile == 0) Scores(task.Tile(0));
    if (tile + 1 < task.Tiles()) Scores(task.Tile(tile + 1));
  }

  __aicore__ inline void QueryProducts(const GradientTile& tile) {
    CrossCoreWaitFlag(kProbabilitiesReady);
    const Operand<T> ds{workspace_.scoreGradients, kAttentionKeys, false};
    const int64_t dim = tiling_.head_dim;
    for (int64_t column = 0; column < dim; column += kTile) {
      Operand<T> k = Key(tile, false);
      k.data = k.data[column];
      matmul_.Multiply(ds, k, workspace_.first[column], dim, tile.queries, Columns(dim, column), tile.keys);
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kProductsReady);
  }

  __aicore__ inline void KeyProducts(const GradientTile& tile) {
    CrossCoreWaitFlag(kProbabilitiesReady);
    const Operand<T> p{workspace_.probabilities, kAttentionKeys, true};
    const Operand<T> ds{workspace_.scoreGradients, kAttentionKeys, true};
    for (int64_t column = 0; column < tiling_.head_dim; column += kTile) {
      Operand<T> q = Query(tile, false);
      q.data = q.data[column];
      matmul_.Multiply(ds, q, workspace_.first[column], tiling_.head_dim, tile.keys, Columns(tiling_.head_dim, column),
                       tile.queries);
    }
    for (int64_t column = 0; column < tiling_.value_dim; column += kTile) {
      matmul_.Multiply(p, GradOut(tile, column, false), workspace_.second[column], tiling_.value_dim, tile.keys,
                       Columns(tiling_.value_dim, column), tile.queries);
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kProductsReady);
  }

 private:
  __aicore__ inline void Scores(const GradientTile& tile) {
    const int64_t at = tile.half * workspace_.kSize;
    matmul_.Multiply(Query(tile, false), Key(tile, true), workspace_.scores[at], kAttentionKeys, tile.queries,
                     tile.keys, tiling_.head_dim);
    matmul_.Multiply(GradOut(tile, 0, false), Value(tile, true), workspace_.gradients[at], kAttentionKeys, tile.queries,
                     tile.keys, tiling_.value_dim);
    CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
  }

  __aicore__ inline int32_t Columns(int64_t dim, int64_t column) const {
    return int32_t(smaller<int64_t>(kTile, dim - column));
  }

  __aicore__ inline Operand<T> Query(const GradientTile& tile, bool transposed) const {
    const int64_t stride = tiling_.num_heads * tiling_.head_dim;
    return {q_[tile.query * stride + tile.head * tiling_.head_dim], stride, transposed};
  }
  __aicore__ inline Operand<T> Key(const GradientTile& tile, bool transposed) const {
    const int64_t stride = tiling_.num_kv_heads * tiling_.head_dim;
    return {k_[tile.key * stride + tile.kvHead * tiling_.head_dim], stride, transposed};
  }
  __aicore__ inline Operand<T> Value(const GradientTile& tile, bool transposed) const {
    const int64_t stride = tiling_.num_kv_heads * tiling_.value_dim;
    return {v_[tile.key * stride + tile.kvHead * tiling_.value_dim], stride, transposed};
  }
  __aicore__ inline Operand<T> GradOut(const GradientTile& tile, int64_t column, bool transposed) const {
    const int64_t stride = tiling_.num_heads * tiling_.value_dim;
    return {gradOut_[tile.query * stride + tile.head * tiling_.value_dim + column], stride, transposed};
  }

  AttentionTiling tiling_;
  TPipe pipe_;
  Matmul<T> matmul_;
  GradientWorkspace<T> workspace_;
  GlobalTensor<T> q_, k_, v_, gradOut_;
};

template <class T>
class GradientVector {
 public:
  // Of tiles of which this core takes `queries` queries; with sums of one width, of grad_q, or two (0: none).
  __aicore__ inline void Init(const GradientArguments& a, const AttentionTiling& tiling, int32_t queries,
                              int64_t firstDim, int64_t secondDim) {
    tiling_ = tiling;
    logsumexp_ = GlobalOf<float>(a.logsumexp, tiling.num_heads * tiling.queries);
    delta_ = GlobalOf<float>(a.delta, tiling.num_heads * tiling.queries);
    workspace_.Init(a.workspace, tiling, GetBlockIdx() / GetSubBlockNum());
    firstWidth_ = int32_t(round_up(firstDim, kRowElements)), secondWidth_ = int32_t(round_up(secondDim, kRowElements));
    queries_ = queries, chunk_ = tiling.rows.chunk, elements_ = chunk_ * kAttentionKeys;
    const int32_t widest = larger(firstWidth_, secondWidth_), sums = tiling.rows.per_core;
    pipe_.InitBuffer(scoresQueue_, 2, (2 * elements_ + 2 * chunk_) * sizeof(float));
    if (secondDim > 0) pipe_.InitBuffer(probabilitiesQueue_, 2, elements_ * sizeof(T));
    pipe_.InitBuffer(scoreGradientsQueue_, 2, elements_ * sizeof(T));
    pipe_.InitBuffer(productsQueue_, 2, chunk_ * widest * sizeof(float));
    pipe_.InitBuffer(outQueue_, 2, chunk_ * widest * sizeof(T));
    const int32_t numbers = chunk_ * kFloatsPerBlock;
    pipe_.InitBuffer(memory_, (sums * (firstWidth_ + secondWidth_) + 2 * numbers + kFloatsPerBlock) * sizeof(float));
    firstSums_ = memory_.Get<float>(), secondSums_ = firstSums_[sums * firstWidth_];
    logsumexpBlocks_ = secondSums_[sums * secondWidth_], deltaBlocks_ = logsumexpBlocks_[numbers];
    ones_ = deltaBlocks_[numbers];
    Duplicate(ones_, 1.0f, kFloatsPerBlock);
    FillQueue(scoresQueue_, 2 * elements_);
    FillQueue(productsQueue_, chunk_ * widest);
  }

  __aicore__ inline void Start() {
    PipeBarrier<PIPE_V>();  // the task before this one still uses them
    Duplicate(firstSums_, 0.0f, tiling_.rows.per_core * (firstWidth_ + secondWidth_));
    PipeBarrier<PIPE_V>();
  }

  // p, if it is needed (for grad_v), and ds of this core's queries of a tile. Its products are there at the end.
  template <class Task>
  __aicore__ inline void Softmax(const Task& task, int64_t tile) {
    if (tile == 0) AwaitScores(task.Tile(0));
    Probabilities(task.Tile(tile));
    if (tile + 1 < task.Tiles()) AwaitScores(task.Tile(tile + 1));
    CrossCoreWaitFlag(kProductsReady);
  }

  // sums += products of `rows` rows from `first`.
  __aicore__ inline void AddFirst(int64_t first, int32_t rows, int64_t dim) {
    AddProducts(firstSums_, workspace_.first[first * dim], rows, dim, firstWidth_);
  }
  __aicore__ inline void AddSecond(int64_t first, int32_t rows, int64_t dim) {
    AddProducts(secondSums_, workspace_.second[first * dim], rows, dim, secondWidth_);
  }

  __aicore__ inline void StoreFirst(const GlobalTensor<T>& to, int32_t rows, int64_t dim, int64_t stride) {
    StoreSums(to, firstSums_, rows, dim, firstWidth_, stride);
  }
  __aicore__ inline void StoreSecond(const GlobalTensor<T>& to, int32_t rows, int64_t dim, int64_t stride) {
    StoreSums(to, secondSums_, rows, dim, secondWidth_, stride);
  }

 private:
  // This core's first query of a tile, and how many it has (at most 0: none).
  __aicore__ inline int32_t FirstQuery() const { return int32_t(GetSubBlockIdx()) * queries_; }
  __aicore__ inline int32_t Queries(const GradientTile& tile) const {
    return smaller(queries_, tile.queries - FirstQuery());
  }

  // The cube core is one tile ahead: a tile's first chunk comes in while the tile before it is finished.
  __aicore__ inline void AwaitScores(const GradientTile& tile) {
    CrossCoreWaitFlag(kScoresReady);
    if (Queries(tile) > 0) LoadScores(tile, 0);
  }

  // A chunk's scores, their gradients, and the logsumexp and delta of its queries.
  __aicore__ inline void LoadScores(const GradientTile& tile, int32_t row) {
    const int32_t rows = smaller(chunk_, Queries(tile) - row), first = FirstQuery() + row;
    const int64_t at = tile.half * workspace_.kSize + first * kAttentionKeys;
    const int64_t query = tile.head * tiling_.queries + tile.query + first;
    const int32_t padded = int32_t(round_up(rows, kFloatsPerBlock));
    LocalTensor<float> scores = scoresQueue_.AllocTensor<float>();
    const LocalTensor<float> numbers = scores[2 * elements_];
    CopyRowsIn(scores, workspace_.scores[at], rows, tile.keys, kAttentionKeys, kAttentionKeys);
    CopyRowsIn(scores[elements_], workspace_.gradients[at], rows, tile.keys, kAttentionKeys, kAttentionKeys);
    CopyRowsIn(numbers, logsumexp_[query], 1, rows, padded, rows);
    CopyRowsIn(numbers[chunk_], delta_[query], 1, rows, padded, rows);
    scoresQueue_.EnQue(scores);
  }

  __aicore__ inline void Probabilities(const GradientTile& tile) {
    const int32_t queries = Queries(tile);
    for (int32_t row = 0; row < queries; row += chunk_) {
      if (row + chunk_ < queries) LoadScores(tile, row + chunk_);
      ChunkProbabilities(tile, row);
    }
    if (queries > 0) {
      CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
    } else {
      // Nothing was stored, but the products of the tile before this one must have been read: the cube overwrites them.
      CrossCoreSetFlag<2, PIPE_MTE2>(kProbabilitiesReady);
    }
  }

  __aicore__ inline void ChunkProbabilities(const GradientTile& tile, int32_t row) {
    const int32_t rows = smaller(chunk_, Queries(tile) - row), first = FirstQuery() + row;
    const int32_t count = rows * kAttentionKeys, padded = int32_t(round_up(rows, kFloatsPerBlock));
    LocalTensor<float> scores = scoresQueue_.DeQue<float>();
    const LocalTensor<float> gradients = scores[elements_], numbers = scores[2 * elements_];
    Broadcast(logsumexpBlocks_, numbers, padded);
    Broadcast(deltaBlocks_, numbers[chunk_], padded);
    PipeBarrier<PIPE_V>();
    SubtractFromRows(gradients, deltaBlocks_, rows, kAttentionKeys);
    ScoresToLogits(tiling_, scores, gradients, ones_, count);
    MaskScores(tiling_, scores, tile.position + first, rows, tile.keys);
    SubtractFromRows(scores, logsumexpBlocks_, rows, kAttentionKeys);
    PipeBarrier<PIPE_V>();
    Exp(scores, scores, count);
    PipeBarrier<PIPE_V>();
    if (secondWidth_ > 0) Store(probabilitiesQueue_, workspace_.probabilities, scores, first, rows, tile.keys);
    Mul(gradients, gradients, scores, count);
    PipeBarrier<PIPE_V>();
    Muls(gradients, gradients, tiling_.softcap == 0 ? tiling_.scale : 4 * tiling_.scale, count);
    PipeBarrier<PIPE_V>();
    Store(scoreGradientsQueue_, workspace_.scoreGradients, gradients, first, rows, tile.keys);
    scoresQueue_.FreeTensor(scores);
  }

  __aicore__ inline void Store(TQue<TPosition::VECOUT, 1>& queue, const GlobalTensor<T>& to,
                               const LocalTensor<float>& values, int32_t first, int32_t rows, int32_t columns) {
    LocalTensor<T> narrow = queue.template AllocTensor<T>();
    Narrow(narrow, values, rows * kAttentionKeys);
    queue.EnQue(narrow);
    narrow = queue.template DeQue<T>();
    CopyRowsOut(to[first * kAttentionKeys], narrow, rows, columns, kAttentionKeys, kAttentionKeys);
    queue.FreeTensor(narrow);
  }

  __aicore__ inline void LoadProducts(const GlobalTensor<float>& from, int32_t rows, int64_t dim, int32_t width) {
    LocalTensor<float> products = productsQueue_.AllocTensor<float>();
    CopyRowsIn(products, from, rows, int32_t(dim), width, dim);
    productsQueue_.EnQue(products);
  }

  __aicore__ inline void AddProducts(const LocalTensor<float>& sums, const GlobalTensor<float>& from, int32_t rows,
                                     int64_t dim, int32_t width) {
    LoadProducts(from, smaller(chunk_, rows), dim, width);
    for (int32_t row = 0; row < rows; row += chunk_) {
      const int32_t next = row + chunk_;
      if (next < rows) LoadProducts(from[next * dim], smaller(chunk_, rows - next), dim, width);
      // The last addition to these sums has ended: barriers of the softmax came after it, or, where this core has no
      // queries, its buffer came back: there are products for two sums.
      LocalTensor<float> products = productsQueue_.DeQue<float>();
      Add(sums[row * width], sums[row * width], products, smaller(chunk_, rows - row) * width);
      productsQueue_.FreeTensor(products);
    }
  }

  __aicore__ inline void StoreSums(const GlobalTensor<T>& to, const LocalTensor<float>& sums, int32_t rows, int64_t dim,
                                   int32_t width, int64_t stride) {
    PipeBarrier<PIPE_V>();
    for (int32_t row = 0; row < rows; row += chunk_) {
      const int32_t count = smaller(chunk_, rows - row);
      LocalTensor<T> out = outQueue_.template AllocTensor<T>();
      Narrow(out, sums[row * width], count * width);
      outQueue_.EnQue(out);
      out = outQueue_.template DeQue<T>();
      CopyRowsOut(to[row * stride], out, count, int32_t(dim), width, stride);
      outQueue_.FreeTensor(out);
    }
  }

  AttentionTiling tiling_;
  int32_t queries_, chunk_, elements_;  // of this core in a tile; of them in a chunk; scores of a chunk
  int32_t firstWidth_, secondWidth_;
  TPipe pipe_;
  ChunkQueue scoresQueue_, productsQueue_;
  TQue<TPosition::VECOUT, 1> probabilitiesQueue_, scoreGradientsQueue_, outQueue_;
  TBuf<TPosition::VECCALC> memory_;
  GradientWorkspace<T> workspace_;
  GlobalTensor<float> logsumexp_, delta_;
  LocalTensor<float> firstSums_, secondSums_, logsumexpBlocks_, deltaBlocks_, ones_;
};

}  // namespace mindspeed::ascend
