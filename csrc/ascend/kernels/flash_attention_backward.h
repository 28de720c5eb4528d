// Flash attention backward. With p = exp(scale · q kᵀ − logsumexp) and delta = Σ grad_out · out − grad_logsumexp of
// each query:
//   ds = scale · p · (grad_out vᵀ − delta)    grad_q = ds k    grad_k = dsᵀ q    grad_v = pᵀ grad_out
// and ds times 1 − tanh² where logits are softcap · tanh(scale · q kᵀ / softcap).
// Blocks of one cube core and two vector cores (__mix__(1, 2)).
//
// Two kernels go over the same tiles: one along the keys of some queries, which sums grad_q, and one along the queries
// of some keys, which sums grad_k and grad_v. That computes scores twice, but no two cores add to the same place: the
// results do not depend on their order. In a tile the cores meet three times:
//   cube    scores = q kᵀ, gradients = grad_out vᵀ    vector  p and ds    cube  their products    vector  adds them up
#pragma once

#include "flash_attention.h"

namespace mindspeed::ascend {

template <class T>
struct GradientWorkspace {
  GlobalTensor<float> scores, gradients, first, second;  // products: grad_q or grad_k, and grad_v
  GlobalTensor<T> probabilities, scoreGradients;

  __aicore__ inline void Init(GM_ADDR workspace, const AttentionTiling& tiling, int64_t block) {
    constexpr int64_t kSize = kAttentionKeys * kAttentionKeys;
    const int64_t products = tiling.gradient_products();
    GM_ADDR at = workspace + block * tiling.gradient_workspace_bytes(sizeof(T));
    scores = GlobalOf<float>(at, kSize), gradients = GlobalOf<float>(at + 4 * kSize, kSize);
    at += 8 * kSize;
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

  __aicore__ inline void Scores(const GradientTile& tile) {
    matmul_.Multiply(Query(tile, false), Key(tile, true), workspace_.scores, kAttentionKeys, tile.queries, tile.keys,
                     tiling_.head_dim);
    matmul_.Multiply(GradOut(tile, 0, false), Value(tile, true), workspace_.gradients, kAttentionKeys, tile.queries,
                     tile.keys, tiling_.value_dim);
    CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
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
  // Sums of up to `sums` rows of one or two widths (0: none).
  __aicore__ inline void Init(const GradientArguments& a, const AttentionTiling& tiling, int32_t sums, int64_t firstDim,
                              int64_t secondDim) {
    tiling_ = tiling;
    logsumexp_ = GlobalOf<float>(a.logsumexp, tiling.num_heads * tiling.queries);
    delta_ = GlobalOf<float>(a.delta, tiling.num_heads * tiling.queries);
    workspace_.Init(a.workspace, tiling, GetBlockIdx() / GetSubBlockNum());
    firstWidth_ = int32_t(round_up(firstDim, kRowElements)), secondWidth_ = int32_t(round_up(secondDim, kRowElements));
    constexpr int32_t kRows = kGradientQueries, kElements = kRows * kAttentionKeys;
    const int32_t widest = larger(firstWidth_, secondWidth_);
    pipe_.InitBuffer(scoresQueue_, 1, kElements * sizeof(float));
    pipe_.InitBuffer(gradientsQueue_, 1, kElements * sizeof(float));
    pipe_.InitBuffer(numbersQueue_, 1, 2 * kRows * sizeof(float));
    pipe_.InitBuffer(probabilitiesQueue_, 1, kElements * sizeof(T));
    pipe_.InitBuffer(scoreGradientsQueue_, 1, kElements * sizeof(T));
    pipe_.InitBuffer(productsQueue_, 1, sums * widest * sizeof(float));
    pipe_.InitBuffer(outQueue_, 1, sums * widest * sizeof(T));
    const int32_t numbers = kRows * kFloatsPerBlock;
    pipe_.InitBuffer(memory_, (sums * (firstWidth_ + secondWidth_) + 2 * numbers + kFloatsPerBlock) * sizeof(float));
    firstSums_ = memory_.Get<float>(), secondSums_ = firstSums_[sums * firstWidth_];
    logsumexpBlocks_ = secondSums_[sums * secondWidth_], deltaBlocks_ = logsumexpBlocks_[numbers];
    ones_ = deltaBlocks_[numbers];
    Duplicate(ones_, 1.0f, kFloatsPerBlock);
    sums_ = sums;
    FillQueue(scoresQueue_, kElements);
    FillQueue(gradientsQueue_, kElements);
    FillQueue(productsQueue_, sums * widest);
  }

  __aicore__ inline void Start() {
    PipeBarrier<PIPE_V>();  // the task before this one still uses them
    Duplicate(firstSums_, 0.0f, sums_ * (firstWidth_ + secondWidth_));
    PipeBarrier<PIPE_V>();
  }

  // p, if it is needed, and ds of this core's half of a tile's queries.
  __aicore__ inline void Softmax(const GradientTile& tile, bool storeProbabilities) {
    CrossCoreWaitFlag(kScoresReady);
    const int32_t first = int32_t(GetSubBlockIdx() * kGradientQueries), count = kGradientQueries * kAttentionKeys;
    const int32_t rows = smaller(kGradientQueries, tile.queries - first);
    if (rows > 0) {
      LoadNumbers(tile.head * tiling_.queries + tile.query + first, rows);
      LocalTensor<float> scores = LoadTile(scoresQueue_, workspace_.scores, first, rows, tile.keys);
      LocalTensor<float> gradients = LoadTile(gradientsQueue_, workspace_.gradients, first, rows, tile.keys);
      PipeBarrier<PIPE_V>();
      SubtractFromRows(gradients, deltaBlocks_, rows, kAttentionKeys);
      ScoresToLogits(tiling_, scores, gradients, ones_, count);
      MaskScores(tiling_, scores, tile.position + first, rows, tile.keys);
      SubtractFromRows(scores, logsumexpBlocks_, rows, kAttentionKeys);
      PipeBarrier<PIPE_V>();
      Exp(scores, scores, count);
      PipeBarrier<PIPE_V>();
      if (storeProbabilities) Store(probabilitiesQueue_, workspace_.probabilities, scores, first, rows, tile.keys);
      Mul(gradients, gradients, scores, count);
      PipeBarrier<PIPE_V>();
      Muls(gradients, gradients, tiling_.softcap == 0 ? tiling_.scale : 4 * tiling_.scale, count);
      PipeBarrier<PIPE_V>();
      Store(scoreGradientsQueue_, workspace_.scoreGradients, gradients, first, rows, tile.keys);
      scoresQueue_.FreeTensor(scores);
      gradientsQueue_.FreeTensor(gradients);
      CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
    } else {
      // Nothing was stored, but the products of the tile before this one must have been read: the cube overwrites them.
      CrossCoreSetFlag<2, PIPE_MTE2>(kProbabilitiesReady);
    }
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
  // The logsumexp and delta of some rows, in blocks.
  __aicore__ inline void LoadNumbers(int64_t at, int32_t rows) {
    const int32_t padded = int32_t(round_up(rows, kFloatsPerBlock));
    LocalTensor<float> numbers = numbersQueue_.AllocTensor<float>();
    CopyRowsIn(numbers, logsumexp_[at], 1, rows, padded, rows);
    CopyRowsIn(numbers[kGradientQueries], delta_[at], 1, rows, padded, rows);
    numbersQueue_.EnQue(numbers);
    numbers = numbersQueue_.DeQue<float>();
    Broadcast(logsumexpBlocks_, numbers, padded);
    Broadcast(deltaBlocks_, numbers[kGradientQueries], padded);
    numbersQueue_.FreeTensor(numbers);
  }

  __aicore__ inline LocalTensor<float> LoadTile(TQue<TPosition::VECIN, 1>& queue, const GlobalTensor<float>& from,
                                                int32_t first, int32_t rows, int32_t columns) {
    LocalTensor<float> tile = queue.AllocTensor<float>();
    CopyRowsIn(tile, from[first * kAttentionKeys], rows, columns, kAttentionKeys, kAttentionKeys);
    queue.EnQue(tile);
    return queue.DeQue<float>();
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

  __aicore__ inline void AddProducts(const LocalTensor<float>& sums, const GlobalTensor<float>& from, int32_t rows,
                                     int64_t dim, int32_t width) {
    LocalTensor<float> products = productsQueue_.AllocTensor<float>();
    CopyRowsIn(products, from, rows, int32_t(dim), width, dim);
    productsQueue_.EnQue(products);
    products = productsQueue_.DeQue<float>();  // its one buffer came back after the last addition
    Add(sums, sums, products, rows * width);
    productsQueue_.FreeTensor(products);
  }

  __aicore__ inline void StoreSums(const GlobalTensor<T>& to, const LocalTensor<float>& sums, int32_t rows, int64_t dim,
                                   int32_t width, int64_t stride) {
    PipeBarrier<PIPE_V>();
    LocalTensor<T> out = outQueue_.template AllocTensor<T>();
    Narrow(out, sums, rows * width);
    outQueue_.EnQue(out);
    out = outQueue_.template DeQue<T>();
    CopyRowsOut(to, out, rows, int32_t(dim), width, stride);
    outQueue_.FreeTensor(out);
  }

  AttentionTiling tiling_;
  int32_t sums_, firstWidth_, secondWidth_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> scoresQueue_, gradientsQueue_, numbersQueue_, productsQueue_;
  TQue<TPosition::VECOUT, 1> probabilitiesQueue_, scoreGradientsQueue_, outQueue_;
  TBuf<TPosition::VECCALC> memory_;
  GradientWorkspace<T> workspace_;
  GlobalTensor<float> logsumexp_, delta_;
  LocalTensor<float> firstSums_, secondSums_, logsumexpBlocks_, deltaBlocks_, ones_;
};

}  // namespace mindspeed::ascend
