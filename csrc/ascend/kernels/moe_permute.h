// The rows of tokens sorted by expert, and back. Vector cores.
//
// source [rows]: the assignment (token · top_k + choice) of each sorted row, or −1. position [tokens, top_k]: the
// sorted row of each assignment, or −1: the inverse of source.
#pragma once

#include "common.h"
#include "moe_tiling.h"

namespace mindspeed::ascend {

// y_sorted [rows, hidden] = the tokens' rows of x; zeros where source is −1.
template <class T>
class MoePermute {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR source, GM_ADDR y, const MoeTiling& tiling) {
    tiling_ = tiling;
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x));
    source_ = GlobalOf<int64_t>(source, tiling.rows);
    y_ = GlobalOf<T>(y, tiling.rows * tiling.hidden);
    pipe_.InitBuffer(queue_, 2, tiling.columns * sizeof(T));
    pipe_.InitBuffer(zerosQueue_, 1, tiling.columns * sizeof(T));
    zeros_ = zerosQueue_.template AllocTensor<T>();
    Duplicate(zeros_.template ReinterpretCast<int16_t>(), int16_t(0), int32_t(tiling.columns * sizeof(T) / 2));
    zerosQueue_.EnQue(zeros_);
    zeros_ = zerosQueue_.template DeQue<T>();
  }

  __aicore__ inline void Process() {
    for (int64_t row = GetBlockIdx(); row < tiling_.rows; row += GetBlockNum()) {
      const int64_t source = source_.GetValue(row);
      for (int64_t column = 0; column < tiling_.hidden; column += tiling_.columns) {
        const int32_t count = int32_t(smaller<int64_t>(tiling_.columns, tiling_.hidden - column));
        const GlobalTensor<T> y = y_[row * tiling_.hidden + column];
        if (source < 0) {
          CopyRowsOut(y, zeros_, 1, count, count, count);
          continue;
        }
        LocalTensor<T> part = queue_.template AllocTensor<T>();
        CopyRowsIn(part, x_[source / tiling_.top_k * tiling_.hidden + column], 1, count, count, count);
        queue_.EnQue(part);
        part = queue_.template DeQue<T>();
        CopyRowsOut(y, part, 1, count, count, count);
        queue_.FreeTensor(part);
      }
    }
    zerosQueue_.FreeTensor(zeros_);
  }

 private:
  MoeTiling tiling_;
  TPipe pipe_;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue_;
  TQue<TPosition::VECOUT, 1> zerosQueue_;
  LocalTensor<T> zeros_;
  GlobalTensor<T> x_, y_;
  GlobalTensor<int64_t> source_;
};

// out [tokens, hidden] = Σ over a token's choices of weight · y_sorted[position], in float32. Without weights it is the
// gradient of the permutation.
template <class T>
class MoeUnpermute {
 public:
  __aicore__ inline void Init(GM_ADDR y, GM_ADDR position, GM_ADDR weights, GM_ADDR out, const MoeTiling& tiling) {
    tiling_ = tiling;
    y_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(y));
    position_ = GlobalOf<int64_t>(position, tiling.rows * tiling.top_k);
    weights_ = GlobalOf<float>(weights, tiling.rows * tiling.top_k);
    out_ = GlobalOf<T>(out, tiling.rows * tiling.hidden);
    pipe_.InitBuffer(yQueue_, 2, tiling.columns * sizeof(T));
    pipe_.InitBuffer(outQueue_, 2, tiling.columns * sizeof(T));
    pipe_.InitBuffer(memory_, 2 * tiling.columns * sizeof(float));
    sum_ = memory_.Get<float>(), row_ = sum_[tiling.columns];
  }

  __aicore__ inline void Process() {
    const int64_t parts = tiling_.parts();
    for (int64_t index = GetBlockIdx(); index < tiling_.rows * parts; index += GetBlockNum()) {
      const int64_t token = index / parts, column = index % parts * tiling_.columns;
      const int32_t count = int32_t(smaller<int64_t>(tiling_.columns, tiling_.hidden - column));
      PipeBarrier<PIPE_V>();  // the part before this one still uses the sum
      Duplicate(sum_, 0.0f, count);
      for (int64_t choice = token * tiling_.top_k; choice < (token + 1) * tiling_.top_k; ++choice) {
        const int64_t position = position_.GetValue(choice);
        if (position < 0) continue;
        AddRow(y_[position * tiling_.hidden + column], tiling_.weighted ? weights_.GetValue(choice) : 1.0f, count);
      }
      PipeBarrier<PIPE_V>();
      LocalTensor<T> out = outQueue_.template AllocTensor<T>();
      Narrow(out, sum_, count);
      outQueue_.EnQue(out);
      out = outQueue_.template DeQue<T>();
      CopyRowsOut(out_[token * tiling_.hidden + column], out, 1, count, count, count);
      outQueue_.FreeTensor(out);
    }
  }

 private:
  __aicore__ inline void AddRow(const GlobalTensor<T>& row, float weight, int32_t count) {
    LocalTensor<T> y = yQueue_.template AllocTensor<T>();
    CopyRowsIn(y, row, 1, count, count, count);
    yQueue_.EnQue(y);
    y = yQueue_.template DeQue<T>();
    PipeBarrier<PIPE_V>();
    Widen(row_, y, count);
    yQueue_.FreeTensor(y);
    PipeBarrier<PIPE_V>();
    Axpy(sum_, row_, weight, count);
  }

  MoeTiling tiling_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> yQueue_;
  TQue<TPosition::VECOUT, 1> outQueue_;
  TBuf<TPosition::VECCALC> memory_;
  LocalTensor<float> sum_, row_;
  GlobalTensor<T> y_, out_;
  GlobalTensor<int64_t> position_;
  GlobalTensor<float> weights_;
};

// The gradient of the weighted sum: grad_y[row] = weight · grad_out[token], grad_weights[assignment] = grad_out[token]
// · y_sorted[row]. Rows whose source is −1 get zeros; the weights of assignments without a row are left alone.
template <class T>
class MoeUnpermuteBackward {
 public:
  __aicore__ inline void Init(GM_ADDR gradOut, GM_ADDR y, GM_ADDR source, GM_ADDR weights, GM_ADDR gradY,
                              GM_ADDR gradWeights, const MoeTiling& tiling) {
    tiling_ = tiling;
    gradOut_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gradOut));
    weights_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(weights));
    gradWeights_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(gradWeights));
    y_ = GlobalOf<T>(y, tiling.rows * tiling.hidden), gradY_ = GlobalOf<T>(gradY, tiling.rows * tiling.hidden);
    source_ = GlobalOf<int64_t>(source, tiling.rows);
    pipe_.InitBuffer(gradOutQueue_, 2, tiling.columns * sizeof(T));
    pipe_.InitBuffer(yQueue_, 2, tiling.columns * sizeof(T));
    pipe_.InitBuffer(gradYQueue_, 2, tiling.columns * sizeof(T));
    pipe_.InitBuffer(dotQueue_, 2, kFloatsPerBlock * sizeof(float));
    pipe_.InitBuffer(memory_, (3 * tiling.columns + 2 * kFloatsPerBlock) * sizeof(float));
    gradient_ = memory_.Get<float>(), row_ = gradient_[tiling.columns], work_ = row_[tiling.columns];
    part_ = work_[tiling.columns], temporaries_ = part_[kFloatsPerBlock];
  }

  __aicore__ inline void Process() {
    for (int64_t row = GetBlockIdx(); row < tiling_.rows; row += GetBlockNum()) {
      const int64_t source = source_.GetValue(row);
      const float weight = source < 0 ? 0.0f : weights_.GetValue(source);
      LocalTensor<float> dot = dotQueue_.AllocTensor<float>();
      Duplicate(dot, 0.0f, kFloatsPerBlock);
      for (int64_t column = 0; column < tiling_.hidden; column += tiling_.columns) {
        const int32_t count = int32_t(smaller<int64_t>(tiling_.columns, tiling_.hidden - column));
        if (source >= 0) AddDot(dot, source / tiling_.top_k * tiling_.hidden + column, row, column, count);
        StoreGradient(source < 0, weight, row, column, count);
      }
      dotQueue_.EnQue(dot);
      dot = dotQueue_.DeQue<float>();
      if (source >= 0) CopyRowsOut(gradWeights_[source], dot, 1, 1, kFloatsPerBlock, 1);
      dotQueue_.FreeTensor(dot);
    }
  }

 private:
  // gradient = a part of grad_out's row; dot += gradient · y
  __aicore__ inline void AddDot(const LocalTensor<float>& dot, int64_t gradAt, int64_t row, int64_t column,
                                int32_t count) {
    LocalTensor<T> gradOut = gradOutQueue_.template AllocTensor<T>(), y = yQueue_.template AllocTensor<T>();
    CopyRowsIn(gradOut, gradOut_[gradAt], 1, count, count, count);
    CopyRowsIn(y, y_[row * tiling_.hidden + column], 1, count, count, count);
    gradOutQueue_.EnQue(gradOut);
    yQueue_.EnQue(y);
    gradOut = gradOutQueue_.template DeQue<T>(), y = yQueue_.template DeQue<T>();
    Widen(gradient_, gradOut, count);
    Widen(row_, y, count);
    gradOutQueue_.FreeTensor(gradOut);
    yQueue_.FreeTensor(y);
    PipeBarrier<PIPE_V>();
    Mul(work_, gradient_, row_, count);
    PipeBarrier<PIPE_V>();
    ReduceSum(part_, work_, temporaries_, count);
    PipeBarrier<PIPE_V>();
    Add(dot, dot, part_, 1);
  }

  __aicore__ inline void StoreGradient(bool skipped, float weight, int64_t row, int64_t column, int32_t count) {
    LocalTensor<T> gradY = gradYQueue_.template AllocTensor<T>();
    if (skipped) {
      PipeBarrier<PIPE_V>();  // the part before this one is still being rounded
      Duplicate(work_, 0.0f, count);
    } else {
      Muls(work_, gradient_, weight, count);
    }
    PipeBarrier<PIPE_V>();
    Narrow(gradY, work_, count);
    gradYQueue_.EnQue(gradY);
    gradY = gradYQueue_.template DeQue<T>();
    CopyRowsOut(gradY_[row * tiling_.hidden + column], gradY, 1, count, count, count);
    gradYQueue_.FreeTensor(gradY);
  }

  MoeTiling tiling_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> gradOutQueue_, yQueue_;
  TQue<TPosition::VECOUT, 1> gradYQueue_, dotQueue_;
  TBuf<TPosition::VECCALC> memory_;
  LocalTensor<float> gradient_, row_, work_, part_, temporaries_;
  GlobalTensor<T> gradOut_, y_, gradY_;
  GlobalTensor<int64_t> source_;
  GlobalTensor<float> weights_, gradWeights_;
};

}  // namespace mindspeed::ascend
