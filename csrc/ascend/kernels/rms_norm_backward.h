// RMSNorm backward. With g = grad_y · weight and x̂ = x · rstd:
//   grad_x = rstd · (g − x̂ · mean(g · x̂)) + grad_sum        grad_weight = Σ over rows of grad_y · x̂
// Vector cores that wait for each other (__mix__(0, 1)): the weight's gradient is summed over the rows of each core,
// then over the cores in their order, so that the result does not depend on which core comes first.
#pragma once

#include "rms_norm.h"

namespace mindspeed::ascend {

// X: of x, grad_sum and grad_x. Y: of grad_y.
template <class X, class Y>
class RmsNormBackward {
 public:
  // workspace: [cores, hidden] float32
  __aicore__ inline void Init(GM_ADDR gradY, GM_ADDR gradSum, GM_ADDR x, GM_ADDR weight, GM_ADDR rstd, GM_ADDR gradX,
                              GM_ADDR gradWeight, GM_ADDR workspace, const RmsNormTiling& tiling) {
    tiling_ = tiling;
    const Tiles& tiles = tiling.tiles;
    const uint64_t size = tiles.matrix_rows * tiles.matrix_columns;
    gradY_ = GlobalOf<Y>(gradY, size), gradSum_ = GlobalOf<X>(gradSum, size), x_ = GlobalOf<X>(x, size);
    gradX_ = GlobalOf<X>(gradX, size), rstd_ = GlobalOf<float>(rstd, tiles.matrix_rows);
    gradWeight_ = GlobalOf<float>(gradWeight, tiles.matrix_columns);
    partial_ = GlobalOf<float>(workspace, GetBlockNum() * tiles.matrix_columns);
    size_ = tiles.rows * tiles.columns, rows_ = PaddedRows(tiles);
    pipe_.InitBuffer(gradYQueue_, 2, size_ * sizeof(Y));
    pipe_.InitBuffer(xQueue_, 2, size_ * sizeof(X));
    pipe_.InitBuffer(numbersQueue_, 2, kRmsNormPartialSums * sizeof(float));
    pipe_.InitBuffer(gradXQueue_, 2, size_ * sizeof(X));
    pipe_.InitBuffer(scratch_, 3 * size_ * sizeof(float));
    pipe_.InitBuffer(scalars_, (2 + 2 * kFloatsPerBlock) * rows_ * sizeof(float));
    if (tiling.has_weight) weight_.Init(pipe_, weight, tiles);
    gradient_ = scratch_.Get<float>(), normalized_ = gradient_[size_], work_ = normalized_[size_];
    dots_ = scalars_.Get<float>(), rstdBlocks_ = dots_[rows_], dotBlocks_ = rstdBlocks_[kFloatsPerBlock * rows_];
    temporaries_ = dotBlocks_[kFloatsPerBlock * rows_];
    Duplicate(dots_, 0.0f, rows_);
    if (tiling.weight_gradient) {
      const int32_t hidden = round_up(tiles.matrix_columns, kRowElements);
      pipe_.InitBuffer(sumQueue_, 1, hidden * sizeof(float));  // kept
      weightSum_ = sumQueue_.AllocTensor<float>();
      Duplicate(weightSum_, 0.0f, hidden);
    }
  }

  __aicore__ inline void Process() {
    const int64_t down = tiling_.tiles.down(), across = tiling_.tiles.across();
    for (int64_t row = GetBlockIdx(); row < down; row += GetBlockNum()) {
      LoadRstd(Tile(tiling_.tiles, row, 0, kWidth));
      for (int64_t column = 0; column < across; ++column) {
        const Tile tile(tiling_.tiles, row, column, kWidth);
        Load(tile);
        AddDots(tile);
      }
      BroadcastDots();
      for (int64_t column = 0; column < across; ++column) {
        const Tile tile(tiling_.tiles, row, column, kWidth);
        if (across > 1) Load(tile);
        LocalTensor<X> gradX = gradXQueue_.template AllocTensor<X>();
        if (tiling_.weight_gradient) AddWeightGradient(tile, gradX);
        ComputeGradX(tile, gradX);
      }
    }
    weight_.Free();
    if (tiling_.weight_gradient) SumOverCores();
  }

 private:
  static constexpr int32_t kWidth = 32 / sizeof(X);
  static_assert(sizeof(X) <= sizeof(Y), "y is at least as wide as x");

  __aicore__ inline int64_t At(const Tile& tile) const { return tile.row * tiling_.tiles.matrix_columns + tile.column; }

  __aicore__ inline void LoadRstd(const Tile& tile) {
    LocalTensor<float> rstd = numbersQueue_.AllocTensor<float>();
    CopyRowsIn(rstd, rstd_[tile.row], 1, tile.rows, rows_, tile.rows);
    numbersQueue_.EnQue(rstd);
    rstd = numbersQueue_.DeQue<float>();
    Broadcast(rstdBlocks_, rstd, round_up(tile.rows, kFloatsPerBlock));
    numbersQueue_.FreeTensor(rstd);
  }

  // gradient = grad_y, normalized = x̂
  __aicore__ inline void Load(const Tile& tile) {
    const int64_t stride = tiling_.tiles.matrix_columns;
    LocalTensor<Y> gradY = gradYQueue_.template AllocTensor<Y>();
    CopyRowsIn(gradY, gradY_[At(tile)], tile.rows, tile.columns, tile.width, stride);
    gradYQueue_.EnQue(gradY);
    LocalTensor<X> x = xQueue_.template AllocTensor<X>();
    CopyRowsIn(x, x_[At(tile)], tile.rows, tile.columns, tile.width, stride);
    xQueue_.EnQue(x);
    gradY = gradYQueue_.template DeQue<Y>(), x = xQueue_.template DeQue<X>();
    for (int32_t r = 0; r < tile.rows; ++r) {
      Widen(gradient_[r * tile.width], gradY[r * tile.width], tile.columns);
    }
    Widen(normalized_, x, tile.count());
    gradYQueue_.FreeTensor(gradY);
    xQueue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
    for (int32_t r = 0; r < tile.rows; ++r) {
      ScaleRow(normalized_[r * tile.width], rstdBlocks_[r * kFloatsPerBlock], tile.columns);
    }
    PipeBarrier<PIPE_V>();
  }

  // to = grad_y · weight, row by row.
  __aicore__ inline void TimesWeight(const LocalTensor<float>& to, const Tile& tile) {
    if (!tiling_.has_weight) {
      for (int32_t r = 0; r < tile.rows; ++r) Muls(to[r * tile.width], gradient_[r * tile.width], 1.0f, tile.columns);
    } else {
      const LocalTensor<float> weight = weight_.Get(tile.column, tile.columns);
      for (int32_t r = 0; r < tile.rows; ++r) {
        Mul(to[r * tile.width], gradient_[r * tile.width], weight, tile.columns);
      }
    }
    PipeBarrier<PIPE_V>();
  }

  // dots += Σ g · x̂ of each row, over its parts.
  __aicore__ inline void AddDots(const Tile& tile) {
    TimesWeight(work_, tile);
    for (int32_t r = 0; r < tile.rows; ++r) {
      Mul(work_[r * tile.width], work_[r * tile.width], normalized_[r * tile.width], tile.columns);
    }
    PipeBarrier<PIPE_V>();
    const LocalTensor<float> sums = tile.column == 0 ? dots_ : dotBlocks_;
    for (int32_t r = 0; r < tile.rows; ++r) ReduceSum(sums[r], work_[r * tile.width], temporaries_, tile.columns);
    PipeBarrier<PIPE_V>();
    if (tile.column > 0) Add(dots_, dots_, dotBlocks_, tile.rows);
  }

  __aicore__ inline void BroadcastDots() {
    PipeBarrier<PIPE_V>();
    Muls(dots_, dots_, -1.0f / tiling_.tiles.matrix_columns, rows_);
    PipeBarrier<PIPE_V>();
    Broadcast(dotBlocks_, dots_, rows_);
  }

  // The columns' sums of grad_y · x̂, with the x̂ that met the weight, for which `rounded` is scratch.
  __aicore__ inline void AddWeightGradient(const Tile& tile, const LocalTensor<X>& rounded) {
    LocalTensor<float> factor = normalized_;
    if (tiling_.round_before_weight && !std::is_same_v<X, float>) {
      for (int32_t r = 0; r < tile.rows; ++r) {
        Narrow(rounded[r * tile.width], normalized_[r * tile.width], tile.columns);
      }
      PipeBarrier<PIPE_V>();
      for (int32_t r = 0; r < tile.rows; ++r) Widen(work_[r * tile.width], rounded[r * tile.width], tile.columns);
      PipeBarrier<PIPE_V>();
      factor = work_;
    }
    for (int32_t r = 0; r < tile.rows; ++r) {
      Mul(work_[r * tile.width], gradient_[r * tile.width], factor[r * tile.width], tile.columns);
    }
    for (int32_t r = 0; r < tile.rows; ++r) {
      PipeBarrier<PIPE_V>();
      Add(weightSum_[tile.column], weightSum_[tile.column], work_[r * tile.width], tile.columns);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void ComputeGradX(const Tile& tile, LocalTensor<X>& gradX) {
    const int64_t stride = tiling_.tiles.matrix_columns;
    TimesWeight(work_, tile);
    for (int32_t r = 0; r < tile.rows; ++r) {
      ScaleRow(normalized_[r * tile.width], dotBlocks_[r * kFloatsPerBlock], tile.columns);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t r = 0; r < tile.rows; ++r) {
      Add(work_[r * tile.width], work_[r * tile.width], normalized_[r * tile.width], tile.columns);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t r = 0; r < tile.rows; ++r) {
      ScaleRow(work_[r * tile.width], rstdBlocks_[r * kFloatsPerBlock], tile.columns);
    }
    if (tiling_.has_residual) {
      LocalTensor<X> gradSum = xQueue_.template AllocTensor<X>();  // x has been given back
      CopyRowsIn(gradSum, gradSum_[At(tile)], tile.rows, tile.columns, tile.width, stride);
      xQueue_.EnQue(gradSum);
      gradSum = xQueue_.template DeQue<X>();
      Widen(normalized_, gradSum, tile.count());
      xQueue_.FreeTensor(gradSum);
      PipeBarrier<PIPE_V>();
      for (int32_t r = 0; r < tile.rows; ++r) {
        Add(work_[r * tile.width], work_[r * tile.width], normalized_[r * tile.width], tile.columns);
      }
    }
    PipeBarrier<PIPE_V>();
    for (int32_t r = 0; r < tile.rows; ++r) Narrow(gradX[r * tile.width], work_[r * tile.width], tile.columns);
    gradXQueue_.EnQue(gradX);
    gradX = gradXQueue_.template DeQue<X>();
    CopyRowsOut(gradX_[At(tile)], gradX, tile.rows, tile.columns, tile.width, stride);
    gradXQueue_.FreeTensor(gradX);
  }

  // Every core stores its sums, waits for the others, and adds up all of them for some of the columns.
  __aicore__ inline void SumOverCores() {
    const int64_t hidden = tiling_.tiles.matrix_columns, cores = GetBlockNum();
    sumQueue_.EnQue(weightSum_);
    weightSum_ = sumQueue_.DeQue<float>();
    CopyRowsOut(partial_[GetBlockIdx() * hidden], weightSum_, 1, hidden, round_up(hidden, kFloatsPerBlock), hidden);
    SyncAll();
    const int64_t share = round_up(ceil_div(hidden, cores), kFloatsPerBlock);
    const int64_t first = smaller(GetBlockIdx() * share, hidden), columns = smaller(share, hidden - first);
    sumQueue_.FreeTensor(weightSum_);
    if (columns == 0) return;
    weightSum_ = sumQueue_.AllocTensor<float>();
    Duplicate(weightSum_, 0.0f, columns);
    for (int64_t core = 0; core < cores; ++core) {
      for (int64_t column = 0; column < columns; column += kRmsNormPartialSums) {
        const int32_t count = int32_t(smaller<int64_t>(kRmsNormPartialSums, columns - column));
        LocalTensor<float> sums = numbersQueue_.AllocTensor<float>();
        CopyRowsIn(sums, partial_[core * hidden + first + column], 1, count, round_up(count, kFloatsPerBlock), count);
        numbersQueue_.EnQue(sums);
        sums = numbersQueue_.DeQue<float>();
        PipeBarrier<PIPE_V>();
        Add(weightSum_[column], weightSum_[column], sums, count);
        numbersQueue_.FreeTensor(sums);
      }
    }
    sumQueue_.EnQue(weightSum_);
    weightSum_ = sumQueue_.DeQue<float>();
    CopyRowsOut(gradWeight_[first], weightSum_, 1, columns, round_up(columns, kFloatsPerBlock), columns);
    sumQueue_.FreeTensor(weightSum_);
  }

  RmsNormTiling tiling_;
  int32_t size_, rows_;  // elements of a tile, numbers of its rows
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> gradYQueue_, xQueue_, numbersQueue_;
  TQue<TPosition::VECOUT, 1> gradXQueue_, sumQueue_;
  TBuf<TPosition::VECCALC> scratch_, scalars_;
  WeightColumns weight_;
  GlobalTensor<Y> gradY_;
  GlobalTensor<X> gradSum_, x_, gradX_;
  GlobalTensor<float> rstd_, gradWeight_, partial_;
  LocalTensor<float> gradient_, normalized_, work_, dots_, rstdBlocks_, dotBlocks_, temporaries_, weightSum_;
};

}  // namespace mindspeed::ascend
