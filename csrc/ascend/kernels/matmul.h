// Products on a cube core: C [m, n] = op(A) · op(B), with m and n up to a tile and any k. 16-bit operands, float32
// sums.
//
// Operands go from global memory to L1 in steps of k, from there to L0A and L0B in smaller ones, and are accumulated in
// L0C. Every buffer is there twice, so that copies and products overlap. cube.h has the layouts.
#pragma once

#include <type_traits>

#include "kernel_operator.h"
#include "tiling.h"

namespace mindspeed::ascend {

using namespace AscendC;

constexpr int32_t kTile = 128, kStepL1 = 256, kStepL0 = 128, kFractal = 16;

// A matrix in global memory: rows `stride` elements apart (at most kMaxMatrixStride). Transposed: the operand is its
// transpose.
template <class T>
struct Operand {
  GlobalTensor<T> data;
  int64_t stride;
  bool transposed;
};

template <class T>
class Matmul {
  static_assert(sizeof(T) == 2, "fractals of other types cannot be transposed on their way to L0");

 public:
  __aicore__ inline void Init(TPipe& pipe) {
    pipe.InitBuffer(a1_, 2, kTile * kStepL1 * sizeof(T));
    pipe.InitBuffer(b1_, 2, kTile * kStepL1 * sizeof(T));
    pipe.InitBuffer(a2_, 2, kTile * kStepL0 * sizeof(T));
    pipe.InitBuffer(b2_, 2, kTile * kStepL0 * sizeof(T));
    pipe.InitBuffer(c_, 2, kTile * kTile * sizeof(float));
  }

  // c: rows `cStride` elements apart; m and n at most kTile, none of m, n and k 0.
  template <class C>
  __aicore__ inline void Multiply(const Operand<T>& a, const Operand<T>& b, const GlobalTensor<C>& c, int64_t cStride,
                                  int32_t m, int32_t n, int64_t k) {
    LocalTensor<float> sums = c_.template AllocTensor<float>();
    for (int64_t at = 0; at < k; at += kStepL1) {
      const int32_t depth = int32_t(smaller<int64_t>(kStepL1, k - at));
      Load(a1_, a, a.transposed, m, depth, at);
      Load(b1_, b, !b.transposed, n, depth, at);
      LocalTensor<T> left = a1_.template DeQue<T>(), right = b1_.template DeQue<T>();
      for (int32_t step = 0; step < depth; step += kStepL0) {
        const int32_t part = smaller(kStepL0, depth - step);
        LoadL0A(left, a.transposed, m, depth, step, part);
        LoadL0B(right, !b.transposed, n, depth, step, part);
        Accumulate(sums, m, n, part, at + step == 0);
      }
      a1_.FreeTensor(left);
      b1_.FreeTensor(right);
    }
    c_.EnQue(sums);
    sums = c_.template DeQue<float>();
    FixpipeParamsV220 store;
    store.mSize = uint16_t(m), store.nSize = uint16_t(n), store.dstStride = uint32_t(cStride);
    store.srcStride = uint16_t(round_up(m, kFractal));
    store.quantPre = std::is_same_v<C, half>         ? QuantMode_t::F322F16
                     : std::is_same_v<C, bfloat16_t> ? QuantMode_t::F322BF16
                                                     : QuantMode_t::NoQuant;
    Fixpipe(c, sums, store);
    c_.FreeTensor(sums);
  }

 private:
  // The part of an operand that a step needs, rows of the tile by depth, or depth by rows where `across`. In L1 each
  // column of 32 bytes has its rows rounded up to 16.
  template <class Queue>
  __aicore__ inline void Load(Queue& queue, const Operand<T>& operand, bool across, int32_t rows, int32_t depth,
                              int64_t at) {
    LocalTensor<T> local = queue.template AllocTensor<T>();
    Nd2NzParams copy;
    copy.ndNum = 1, copy.srcDValue = uint16_t(operand.stride), copy.dstNzNStride = 1;
    copy.nValue = uint16_t(across ? depth : rows), copy.dValue = uint16_t(across ? rows : depth);
    copy.dstNzC0Stride = uint16_t(round_up(copy.nValue, kFractal));
    DataCopy(local, operand.data[across ? at * operand.stride : at], copy);
    queue.EnQue(local);
  }

  // To [M1, K1, 16 m, 16 k]: row of fractals by row of fractals.
  __aicore__ inline void LoadL0A(const LocalTensor<T>& from, bool across, int32_t m, int32_t depth, int32_t at,
                                 int32_t part) {
    const int32_t rows = int32_t(ceil_div(m, kFractal)), steps = int32_t(ceil_div(part, kFractal));
    const int32_t depths = int32_t(ceil_div(depth, kFractal)), first = at / kFractal;
    LocalTensor<T> to = a2_.template AllocTensor<T>();
    LoadData2DParams load;
    load.repeatTimes = uint8_t(steps), load.srcStride = uint16_t(across ? 1 : rows), load.ifTranspose = across;
    for (int32_t row = 0; row < rows; ++row) {
      const int32_t fractal = across ? row * depths + first : first * rows + row;
      LoadData(to[row * steps * kFractal * kFractal], from[fractal * kFractal * kFractal], load);
    }
    a2_.EnQue(to);
  }

  // To [K1, N1, 16 n, 16 k].
  __aicore__ inline void LoadL0B(const LocalTensor<T>& from, bool across, int32_t n, int32_t depth, int32_t at,
                                 int32_t part) {
    const int32_t columns = int32_t(ceil_div(n, kFractal)), steps = int32_t(ceil_div(part, kFractal));
    const int32_t depths = int32_t(ceil_div(depth, kFractal)), first = at / kFractal;
    LocalTensor<T> to = b2_.template AllocTensor<T>();
    LoadData2DParams load;
    load.repeatTimes = uint8_t(columns), load.srcStride = uint16_t(across ? depths : 1), load.ifTranspose = across;
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t fractal = across ? first + step : (first + step) * columns;
      LoadData(to[step * columns * kFractal * kFractal], from[fractal * kFractal * kFractal], load);
    }
    b2_.EnQue(to);
  }

  __aicore__ inline void Accumulate(const LocalTensor<float>& sums, int32_t m, int32_t n, int32_t k, bool first) {
    LocalTensor<T> left = a2_.template DeQue<T>(), right = b2_.template DeQue<T>();
    MmadParams product;
    product.m = uint16_t(m), product.n = uint16_t(n), product.k = uint16_t(k), product.cmatrixInitVal = first;
    // A small product may start before the one that it adds to has ended.
    if (!first && (m / kFractal) * (n / kFractal) < 10) PipeBarrier<PIPE_M>();
    Mmad(sums, left, right, product);
    a2_.FreeTensor(left);
    b2_.FreeTensor(right);
  }

  TQue<TPosition::A1, 1> a1_;
  TQue<TPosition::B1, 1> b1_;
  TQue<TPosition::A2, 1> a2_;
  TQue<TPosition::B2, 1> b2_;
  TQue<TPosition::CO1, 1> c_;
};

}  // namespace mindspeed::ascend
