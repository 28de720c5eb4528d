// RMSNorm forward: y = x̂ · weight with x̂ = x · rstd and rstd = 1 / sqrt(mean(x²) + eps). Vector cores.
//
// A core takes tiles of rows. Rows that do not fit into the unified buffer are read in parts of `columns`, twice: for
// the sums, and for the results.
#pragma once

#include "common.h"
#include "rms_norm_tiling.h"

namespace mindspeed::ascend {

// Numbers of each row of a tile. Brcb takes eight at a time.
__aicore__ inline int32_t PaddedRows(const Tiles& tiles) { return int32_t(round_up(tiles.rows, kFloatsPerBlock)); }

// The weight of the columns that are worked on, loaded when they change: once if rows are whole.
class WeightColumns {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR weight, const Tiles& tiles) {
    weight_ = GlobalOf<float>(weight, tiles.matrix_columns);
    pipe.InitBuffer(queue_, tiles.across() > 1 ? 2 : 1, tiles.columns * sizeof(float));
  }

  __aicore__ inline LocalTensor<float> Get(int64_t column, int32_t columns) {
    if (column == column_) return local_;
    if (column_ >= 0) queue_.FreeTensor(local_);
    local_ = queue_.AllocTensor<float>();
    CopyRowsIn(local_, weight_[column], 1, columns, round_up(columns, kFloatsPerBlock), columns);
    queue_.EnQue(local_);
    local_ = queue_.DeQue<float>();
    column_ = column;
    return local_;
  }

  __aicore__ inline void Free() {
    if (column_ >= 0) queue_.FreeTensor(local_);
    column_ = -1;
  }

 private:
  GlobalTensor<float> weight_;
  TQue<TPosition::VECIN, 1> queue_;
  LocalTensor<float> local_;
  int64_t column_ = -1;
};

// X: of x, residual and sum. Y: of y.
template <class X, class Y>
class RmsNormForward {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR y, GM_ADDR sum, GM_ADDR rstd,
                              const RmsNormTiling& tiling) {
    tiling_ = tiling;
    const Tiles& tiles = tiling.tiles;
    const uint64_t size = tiles.matrix_rows * tiles.matrix_columns;
    x_ = GlobalOf<X>(x, size), residual_ = GlobalOf<X>(residual, size), sum_ = GlobalOf<X>(sum, size);
    y_ = GlobalOf<Y>(y, size), rstd_ = GlobalOf<float>(rstd, tiles.matrix_rows);
    size_ = tiles.rows * tiles.columns, rows_ = PaddedRows(tiles);
    pipe_.InitBuffer(xQueue_, 2, size_ * sizeof(X));
    if (tiling.has_residual) {
      pipe_.InitBuffer(residualQueue_, 2, size_ * sizeof(X));
      pipe_.InitBuffer(sumQueue_, 2, size_ * sizeof(X));
    }
    pipe_.InitBuffer(yQueue_, 2, size_ * sizeof(Y));
    pipe_.InitBuffer(rstdQueue_, 2, rows_ * sizeof(float));
    pipe_.InitBuffer(scratch_, 2 * size_ * sizeof(float));
    pipe_.InitBuffer(scalars_, (3 + kFloatsPerBlock) * rows_ * sizeof(float));
    if (tiling.has_weight) weight_.Init(pipe_, weight, tiles);
    total_ = scratch_.Get<float>(), work_ = total_[size_];
    squares_ = scalars_.Get<float>(), ones_ = squares_[rows_], blocks_ = ones_[rows_];
    temporaries_ = blocks_[kFloatsPerBlock * rows_];
    Duplicate(squares_, 1.0f, 2 * rows_);  // and the ones
  }

  __aicore__ inline void Process() {
    const int64_t down = tiling_.tiles.down(), across = tiling_.tiles.across();
    for (int64_t row = GetBlockIdx(); row < down; row += GetBlockNum()) {
      for (int64_t column = 0; column < across; ++column) {
        const Tile tile(tiling_.tiles, row, column, kWidth);
        CopyIn(tile);
        ReadTotal(tile, true);
        AddSquares(tile);
      }
      ComputeRstd(Tile(tiling_.tiles, row, 0, kWidth));
      for (int64_t column = 0; column < across; ++column) {
        const Tile tile(tiling_.tiles, row, column, kWidth);
        if (across > 1) {
          CopyIn(tile);
          ReadTotal(tile, false);
        }
        Normalize(tile);
        CopyOut(tile);
      }
    }
    weight_.Free();
  }

 private:
  static constexpr int32_t kWidth = 32 / (sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y));

  __aicore__ inline int64_t At(const Tile& tile) const { return tile.row * tiling_.tiles.matrix_columns + tile.column; }

  __aicore__ inline void CopyIn(const Tile& tile) {
    const int64_t stride = tiling_.tiles.matrix_columns;
    LocalTensor<X> x = xQueue_.template AllocTensor<X>();
    CopyRowsIn(x, x_[At(tile)], tile.rows, tile.columns, tile.width, stride);
    xQueue_.EnQue(x);
    if (!tiling_.has_residual) return;
    LocalTensor<X> residual = residualQueue_.template AllocTensor<X>();
    CopyRowsIn(residual, residual_[At(tile)], tile.rows, tile.columns, tile.width, stride);
    residualQueue_.EnQue(residual);
  }

  // total = x, or x + residual rounded to X, which is stored the first time.
  __aicore__ inline void ReadTotal(const Tile& tile, bool store) {
    LocalTensor<X> x = xQueue_.template DeQue<X>();
    PipeBarrier<PIPE_V>();  // what came before still reads the scratch
    Widen(total_, x, tile.count());
    xQueue_.FreeTensor(x);
    if (tiling_.has_residual) {
      LocalTensor<X> residual = residualQueue_.template DeQue<X>();
      Widen(work_, residual, tile.count());
      residualQueue_.FreeTensor(residual);
      PipeBarrier<PIPE_V>();
      Add(total_, total_, work_, tile.count());
      PipeBarrier<PIPE_V>();
      LocalTensor<X> sum = sumQueue_.template AllocTensor<X>();
      Narrow(sum, total_, tile.count());
      PipeBarrier<PIPE_V>();
      Widen(total_, sum, tile.count());
      if (store) {
        sumQueue_.EnQue(sum);
        sum = sumQueue_.template DeQue<X>();
        CopyRowsOut(sum_[At(tile)], sum, tile.rows, tile.columns, tile.width, tiling_.tiles.matrix_columns);
      }
      sumQueue_.FreeTensor(sum);
    }
    PipeBarrier<PIPE_V>();
  }

  // The rows' sums of squares, over their parts.
  __aicore__ inline void AddSquares(const Tile& tile) {
    Mul(work_, total_, total_, tile.count());
    PipeBarrier<PIPE_V>();
    const LocalTensor<float> sums = tile.column == 0 ? squares_ : blocks_;
    for (int32_t r = 0; r < tile.rows; ++r) ReduceSum(sums[r], work_[r * tile.width], temporaries_, tile.columns);
    PipeBarrier<PIPE_V>();
    if (tile.column > 0) Add(squares_, squares_, blocks_, tile.rows);
  }

  __aicore__ inline void ComputeRstd(const Tile& tile) {
    PipeBarrier<PIPE_V>();
    Muls(squares_, squares_, 1.0f / tiling_.tiles.matrix_columns, tile.rows);
    PipeBarrier<PIPE_V>();
    Adds(squares_, squares_, tiling_.eps, tile.rows);
    PipeBarrier<PIPE_V>();
    Sqrt(squares_, squares_, tile.rows);
    PipeBarrier<PIPE_V>();
    LocalTensor<float> rstd = rstdQueue_.AllocTensor<float>();
    Div(rstd, ones_, squares_, rows_);
    PipeBarrier<PIPE_V>();
    Broadcast(blocks_, rstd, rows_);
    rstdQueue_.EnQue(rstd);
    rstd = rstdQueue_.DeQue<float>();
    CopyRowsOut(rstd_[tile.row], rstd, 1, tile.rows, round_up(tile.rows, kFloatsPerBlock), tile.rows);
    rstdQueue_.FreeTensor(rstd);
  }

  __aicore__ inline void Normalize(const Tile& tile) {
    PipeBarrier<PIPE_V>();
    for (int32_t r = 0; r < tile.rows; ++r) ScaleRow(total_[r * tile.width], blocks_[r * kFloatsPerBlock], tile.width);
    PipeBarrier<PIPE_V>();
    if (tiling_.round_before_weight && !std::is_same_v<X, float>) {
      const LocalTensor<X> rounded = work_.template ReinterpretCast<X>();
      Narrow(rounded, total_, tile.count());
      PipeBarrier<PIPE_V>();
      Widen(total_, rounded, tile.count());
      PipeBarrier<PIPE_V>();
    }
    if (tiling_.has_weight) {
      const LocalTensor<float> weight = weight_.Get(tile.column, tile.columns);
      for (int32_t r = 0; r < tile.rows; ++r) {
        Mul(total_[r * tile.width], total_[r * tile.width], weight, tile.columns);
      }
      PipeBarrier<PIPE_V>();
    }
    LocalTensor<Y> y = yQueue_.template AllocTensor<Y>();
    Narrow(y, total_, tile.count());
    yQueue_.EnQue(y);
  }

  __aicore__ inline void CopyOut(const Tile& tile) {
    LocalTensor<Y> y = yQueue_.template DeQue<Y>();
    CopyRowsOut(y_[At(tile)], y, tile.rows, tile.columns, tile.width, tiling_.tiles.matrix_columns);
    yQueue_.FreeTensor(y);
  }

  RmsNormTiling tiling_;
  int32_t size_, rows_;  // elements of a tile, numbers of its rows
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> xQueue_, residualQueue_;
  TQue<TPosition::VECOUT, 1> yQueue_, sumQueue_, rstdQueue_;
  TBuf<TPosition::VECCALC> scratch_, scalars_;
  WeightColumns weight_;
  GlobalTensor<X> x_, residual_, sum_;
  GlobalTensor<Y> y_;
  GlobalTensor<float> rstd_;
  LocalTensor<float> total_, work_, squares_, ones_, blocks_, temporaries_;
};

}  // namespace mindspeed::ascend
