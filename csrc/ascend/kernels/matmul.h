// Products on a cube core: C [m, n] = op(A) · op(B), with m and n up to a tile and any k. Operands of 16 bits or
// float32, float32 sums.
//
// Operands go from global memory to L1 in steps of k, from there to L0A and L0B in smaller ones, and are accumulated in
// L0C. Every buffer is there twice, so that copies and products overlap. cube.h has the layouts.
#pragma once

#include <type_traits>

#include "kernel_operator.h"
#include "tiling.h"

namespace mindspeed::ascend {

using namespace AscendC;

constexpr int32_t kTile = 128, kFractal = 16;

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
  static constexpr int32_t kColumns = 32 / sizeof(T);  // of a fractal
  static constexpr int32_t kStepL1 = 512 / sizeof(T), kStepL0 = 256 / sizeof(T);
  // Fractals of floats are half a square each. To be transposed, the halves have to be neighbours in L1.
  static constexpr bool kHalfSquares = sizeof(T) == 4;

 public:
  __aicore__ inline void Init(TPipe& pipe) {
    pipe.InitBuffer(a1_, 2, kTile * kStepL1 * sizeof(T));
    pipe.InitBuffer(b1_, 2, kTile * kStepL1 * sizeof(T));
    pipe.InitBuffer(a2_, 2, kTile * kStepL0 * sizeof(T));
    pipe.InitBuffer(b2_, 2, kTile * kStepL0 * sizeof(T));
    pipe.InitBuffer(c_, 2, kTile * kTile * sizeof(float));
    if constexpr (std::is_same_v<T, float>) SetHF32Mode(HF32Mode::DISABLE);
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
  // The part of an operand that a step needs, rows of the tile by depth, or depth by rows where `across`. L1 has
  // columns of 32 bytes, with as many rows as the part, rounded up to 16; of what is transposed in two halves, 16 rows
  // of all columns after 16 rows.
  template <class Queue>
  __aicore__ inline void Load(Queue& queue, const Operand<T>& operand, bool across, int32_t rows, int32_t depth,
                              int64_t at) {
    LocalTensor<T> local = queue.template AllocTensor<T>();
    const GlobalTensor<T> from = operand.data[across ? at * operand.stride : at];
    const int32_t height = across ? depth : rows, width = across ? rows : depth;
    const int32_t part = across && kHalfSquares ? kFractal : height;
    Nd2NzParams copy;
    copy.dValue = uint16_t(width), copy.srcDValue = uint16_t(operand.stride);
    copy.dstNzNStride = 1, copy.dstNzC0Stride = uint16_t(round_up(part, kFractal));
    copy.ndNum = height == 1 ? 2 : 1, copy.dstNzMatrixStride = kColumns;  // a row alone twice: Accumulate says why
    for (int32_t row = 0; row < height; row += part) {
      copy.nValue = uint16_t(smaller(part, height - row));
      DataCopy(local[row * round_up(width, kFractal)], from[row * operand.stride], copy);
    }
    queue.EnQue(local);
  }

  // To [M1, K1, 16 m, C0 k], row of fractals by row of fractals, whole squares in each.
  __aicore__ inline void LoadL0A(const LocalTensor<T>& from, bool across, int32_t m, int32_t depth, int32_t at,
                                 int32_t part) {
    const int32_t rows = int32_t(ceil_div(m, kFractal)), depths = int32_t(ceil_div(depth, kFractal));
    const int32_t first = at / kFractal, squares = int32_t(ceil_div(part, kFractal));
    LocalTensor<T> to = a2_.template AllocTensor<T>();
    for (int32_t row = 0; row < rows; ++row) {
      const LocalTensor<T> out = to[row * squares * kFractal * kFractal];
      if (!across) {
        LoadFractals(out, from, at / kColumns * rows + row, rows, int32_t(ceil_div(part, kColumns)), false);
      } else if constexpr (kHalfSquares) {
        LoadSquares(out, from, first * rows + row, rows, squares, 1, 0);
      } else {
        LoadFractals(out, from, row * depths + first, 1, squares, true);
      }
    }
    a2_.EnQue(to);
  }

  // To [K1, N1, 16 n, C0 k].
  __aicore__ inline void LoadL0B(const LocalTensor<T>& from, bool across, int32_t n, int32_t depth, int32_t at,
                                 int32_t part) {
    const int32_t columns = int32_t(ceil_div(n, kFractal)), depths = int32_t(ceil_div(depth, kFractal));
    const int32_t first = at / kFractal, squares = int32_t(ceil_div(part, kFractal));
    LocalTensor<T> to = b2_.template AllocTensor<T>();
    if (!across) {
      LoadFractals(to, from, at / kColumns * columns, 1, int32_t(ceil_div(part, kColumns)) * columns, false);
    }
    for (int32_t step = 0; across && step < squares; ++step) {
      const LocalTensor<T> out = to[step * columns * kFractal * kFractal];
      if constexpr (kHalfSquares) {
        LoadSquares(out, from, (first + step) * columns, 1, columns, 0, columns - 1);
      } else {
        LoadFractals(out, from, first + step, depths, columns, true);
      }
    }
    b2_.EnQue(to);
  }

  // `count` fractals from the first one, `stride` apart, to one after the other.
  __aicore__ inline void LoadFractals(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t first,
                                      int32_t stride, int32_t count, bool transposed) {
    LoadData2DParams load;
    load.startIndex = uint16_t(first), load.srcStride = uint16_t(stride), load.repeatTimes = uint8_t(count);
    load.ifTranspose = transposed;
    LoadData(to, from, load);
  }

  // The same of squares, transposed. Gaps in fractals: from the first half of one to that of the next, within one.
  __aicore__ inline void LoadSquares(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t first,
                                     int32_t stride, int32_t count, int32_t gap, int32_t halfGap) {
    LoadData2dTransposeParams load;
    load.startIndex = uint16_t(first), load.srcStride = uint16_t(stride), load.repeatTimes = uint8_t(count);
    load.dstGap = uint16_t(gap), load.dstFracGap = uint16_t(halfGap);
    LoadDataWithTranspose(to, from, load);
  }

  __aicore__ inline void Accumulate(const LocalTensor<float>& sums, int32_t m, int32_t n, int32_t k, bool first) {
    LocalTensor<T> left = a2_.template DeQue<T>(), right = b2_.template DeQue<T>();
    MmadParams product;
    // Of a product with m = 1 the cube takes A to be no fractals, but one run of k elements.
    product.m = uint16_t(larger(m, 2)), product.n = uint16_t(n), product.k = uint16_t(k);
    product.kDirectionAlign = true, product.cmatrixInitVal = first;
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
