// SwiGLU: y = silu(gate) · up, and its gradient. Vector cores.
#pragma once

#include "common.h"
#include "swiglu_tiling.h"

namespace mindspeed::ascend {

// e = exp(−gate)
__aicore__ inline void ExpNegative(const LocalTensor<float>& e, const LocalTensor<float>& gate, int32_t count) {
  Muls(e, gate, -1.0f, count);
  PipeBarrier<PIPE_V>();
  Exp(e, e, count);
  PipeBarrier<PIPE_V>();
}

template <class T>
class SwigluForward {
 public:
  __aicore__ inline void Init(GM_ADDR gate, GM_ADDR up, GM_ADDR y, const SwigluTiling& tiling) {
    tiling_ = tiling;
    const Tiles& tiles = tiling.tiles;
    const int64_t last = tiles.matrix_rows - 1;
    gate_ = GlobalOf<T>(gate, last * tiling.gate_stride + tiles.matrix_columns);
    up_ = GlobalOf<T>(up, last * tiling.up_stride + tiles.matrix_columns);
    y_ = GlobalOf<T>(y, tiles.matrix_rows * tiles.matrix_columns);
    const uint32_t elements = tiles.rows * tiles.columns;
    pipe_.InitBuffer(gateQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(upQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(yQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(scratch_, 3 * elements * sizeof(float));
  }

  __aicore__ inline void Process() {
    const int64_t across = tiling_.tiles.across(), tiles = tiling_.tiles.down() * across;
    for (int64_t index = GetBlockIdx(); index < tiles; index += GetBlockNum()) {
      const Tile tile(tiling_.tiles, index / across, index % across, 32 / sizeof(T));
      CopyIn(tile);
      Compute(tile);
      CopyOut(tile);
    }
  }

 private:
  __aicore__ inline void CopyIn(const Tile& tile) {
    LocalTensor<T> gate = gateQueue_.template AllocTensor<T>(), up = upQueue_.template AllocTensor<T>();
    CopyRowsIn(gate, gate_[tile.row * tiling_.gate_stride + tile.column], tile.rows, tile.columns, tile.width,
               tiling_.gate_stride);
    CopyRowsIn(up, up_[tile.row * tiling_.up_stride + tile.column], tile.rows, tile.columns, tile.width,
               tiling_.up_stride);
    gateQueue_.EnQue(gate);
    upQueue_.EnQue(up);
  }

  // y = gate / (1 + exp(−gate)) · up
  __aicore__ inline void Compute(const Tile& tile) {
    const int32_t count = tile.count(), size = tiling_.tiles.rows * tiling_.tiles.columns;
    const LocalTensor<float> gate = scratch_.Get<float>(), up = gate[size], e = up[size];
    LocalTensor<T> gateIn = gateQueue_.template DeQue<T>(), upIn = upQueue_.template DeQue<T>();
    Widen(gate, gateIn, count);
    Widen(up, upIn, count);
    gateQueue_.FreeTensor(gateIn);
    upQueue_.FreeTensor(upIn);
    PipeBarrier<PIPE_V>();
    ExpNegative(e, gate, count);
    Adds(e, e, 1.0f, count);
    PipeBarrier<PIPE_V>();
    Div(e, gate, e, count);
    PipeBarrier<PIPE_V>();
    Mul(e, e, up, count);
    PipeBarrier<PIPE_V>();
    LocalTensor<T> y = yQueue_.template AllocTensor<T>();
    Narrow(y, e, count);
    yQueue_.EnQue(y);
  }

  __aicore__ inline void CopyOut(const Tile& tile) {
    const int64_t stride = tiling_.tiles.matrix_columns;
    LocalTensor<T> y = yQueue_.template DeQue<T>();
    CopyRowsOut(y_[tile.row * stride + tile.column], y, tile.rows, tile.columns, tile.width, stride);
    yQueue_.FreeTensor(y);
  }

  SwigluTiling tiling_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> gateQueue_, upQueue_;
  TQue<TPosition::VECOUT, 1> yQueue_;
  TBuf<TPosition::VECCALC> scratch_;
  GlobalTensor<T> gate_, up_, y_;
};

// With s = 1 / (1 + exp(−gate)): grad_up = grad_y · gate · s, grad_gate = grad_y · up · (s + gate · s · (1 − s)).
template <class T>
class SwigluBackward {
 public:
  __aicore__ inline void Init(GM_ADDR gradY, GM_ADDR gate, GM_ADDR up, GM_ADDR gradGate, GM_ADDR gradUp,
                              const SwigluTiling& tiling) {
    tiling_ = tiling;
    const Tiles& tiles = tiling.tiles;
    const int64_t last = tiles.matrix_rows - 1;
    const uint64_t gateSize = last * tiling.gate_stride + tiles.matrix_columns;
    const uint64_t upSize = last * tiling.up_stride + tiles.matrix_columns;
    gradY_ = GlobalOf<T>(gradY, tiles.matrix_rows * tiles.matrix_columns);
    gate_ = GlobalOf<T>(gate, gateSize), gradGate_ = GlobalOf<T>(gradGate, gateSize);
    up_ = GlobalOf<T>(up, upSize), gradUp_ = GlobalOf<T>(gradUp, upSize);
    const uint32_t elements = tiles.rows * tiles.columns;
    pipe_.InitBuffer(gradYQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(gateQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(upQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(gradGateQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(gradUpQueue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(scratch_, 5 * elements * sizeof(float));
  }

  __aicore__ inline void Process() {
    const int64_t across = tiling_.tiles.across(), tiles = tiling_.tiles.down() * across;
    for (int64_t index = GetBlockIdx(); index < tiles; index += GetBlockNum()) {
      const Tile tile(tiling_.tiles, index / across, index % across, 32 / sizeof(T));
      CopyIn(tile);
      Compute(tile);
      CopyOut(tile);
    }
  }

 private:
  __aicore__ inline void CopyIn(const Tile& tile) {
    const int64_t stride = tiling_.tiles.matrix_columns;
    LocalTensor<T> gradY = gradYQueue_.template AllocTensor<T>(), gate = gateQueue_.template AllocTensor<T>(),
                   up = upQueue_.template AllocTensor<T>();
    CopyRowsIn(gradY, gradY_[tile.row * stride + tile.column], tile.rows, tile.columns, tile.width, stride);
    CopyRowsIn(gate, gate_[tile.row * tiling_.gate_stride + tile.column], tile.rows, tile.columns, tile.width,
               tiling_.gate_stride);
    CopyRowsIn(up, up_[tile.row * tiling_.up_stride + tile.column], tile.rows, tile.columns, tile.width,
               tiling_.up_stride);
    gradYQueue_.EnQue(gradY);
    gateQueue_.EnQue(gate);
    upQueue_.EnQue(up);
  }

  __aicore__ inline void Compute(const Tile& tile) {
    const int32_t count = tile.count(), size = tiling_.tiles.rows * tiling_.tiles.columns;
    const LocalTensor<float> gradY = scratch_.Get<float>(), gate = gradY[size], up = gate[size], s = up[size],
                             work = s[size];
    LocalTensor<T> gradYIn = gradYQueue_.template DeQue<T>(), gateIn = gateQueue_.template DeQue<T>(),
                   upIn = upQueue_.template DeQue<T>();
    PipeBarrier<PIPE_V>();  // the tile before this one still reads the scratch
    Widen(gradY, gradYIn, count);
    Widen(gate, gateIn, count);
    Widen(up, upIn, count);
    gradYQueue_.FreeTensor(gradYIn);
    gateQueue_.FreeTensor(gateIn);
    upQueue_.FreeTensor(upIn);
    Duplicate(work, 1.0f, count);
    PipeBarrier<PIPE_V>();
    ExpNegative(s, gate, count);
    Adds(s, s, 1.0f, count);
    Mul(up, up, gradY, count);  // grad_y · up
    PipeBarrier<PIPE_V>();
    Div(s, work, s, count);
    PipeBarrier<PIPE_V>();
    Mul(gate, gate, s, count);  // silu
    Sub(work, work, s, count);  // 1 − s
    PipeBarrier<PIPE_V>();
    Mul(work, work, gate, count);
    Mul(gradY, gradY, gate, count);  // grad_up
    PipeBarrier<PIPE_V>();
    Add(work, work, s, count);
    PipeBarrier<PIPE_V>();
    Mul(work, work, up, count);  // grad_gate
    PipeBarrier<PIPE_V>();
    LocalTensor<T> gradGate = gradGateQueue_.template AllocTensor<T>(), gradUp = gradUpQueue_.template AllocTensor<T>();
    Narrow(gradGate, work, count);
    Narrow(gradUp, gradY, count);
    gradGateQueue_.EnQue(gradGate);
    gradUpQueue_.EnQue(gradUp);
  }

  __aicore__ inline void CopyOut(const Tile& tile) {
    LocalTensor<T> gradGate = gradGateQueue_.template DeQue<T>(), gradUp = gradUpQueue_.template DeQue<T>();
    CopyRowsOut(gradGate_[tile.row * tiling_.gate_stride + tile.column], gradGate, tile.rows, tile.columns, tile.width,
                tiling_.gate_stride);
    CopyRowsOut(gradUp_[tile.row * tiling_.up_stride + tile.column], gradUp, tile.rows, tile.columns, tile.width,
                tiling_.up_stride);
    gradGateQueue_.FreeTensor(gradGate);
    gradUpQueue_.FreeTensor(gradUp);
  }

  SwigluTiling tiling_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> gradYQueue_, gateQueue_, upQueue_;
  TQue<TPosition::VECOUT, 1> gradGateQueue_, gradUpQueue_;
  TBuf<TPosition::VECCALC> scratch_;
  GlobalTensor<T> gradY_, gate_, up_, gradGate_, gradUp_;
};

}  // namespace mindspeed::ascend
