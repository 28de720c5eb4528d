// Products of consecutive groups of rows with one weight each (the experts of a mixture), and the weights' gradients.
// Cube cores.
#pragma once

#include "grouped_gemm_tiling.h"
#include "matmul.h"

namespace mindspeed::ascend {

// y [rows, n] = x [rows, k] · weight of the row's group. offsets [groups]: the row after each group's last. Rows after
// the last group are left alone. The gradient of x is the same product with the other layout of the weight.
template <class T>
class GroupedGemm {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR weight, GM_ADDR offsets, GM_ADDR y, const GroupedGemmTiling& tiling) {
    tiling_ = tiling;
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x));
    weight_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(weight));
    y_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(y));
    offsets_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(offsets), tiling.groups);
    matmul_.Init(pipe_);
  }

  __aicore__ inline void Process() {
    const int64_t k = tiling_.k, n = tiling_.n, across = ceil_div(n, kTile);
    int64_t index = 0;  // of all tiles; every core takes some
    for (int64_t group = 0, begin = 0; group < tiling_.groups; ++group) {
      const int64_t end = offsets_.GetValue(group);
      const GlobalTensor<T> weight = weight_[group * k * n];
      for (int64_t row = begin; row < end; row += kTile) {
        for (int64_t tile = 0; tile < across; ++tile, ++index) {
          if (index % GetBlockNum() != GetBlockIdx()) continue;
          const int64_t column = tile * kTile;
          const Operand<T> left{x_[row * k], k, false};
          const Operand<T> right =
              tiling_.transposed ? Operand<T>{weight[column], n, false} : Operand<T>{weight[column * k], k, true};
          matmul_.Multiply(left, right, y_[row * n + column], n, int32_t(smaller<int64_t>(kTile, end - row)),
                           int32_t(smaller<int64_t>(kTile, n - column)), k);
        }
      }
      begin = end;
    }
  }

 private:
  GroupedGemmTiling tiling_;
  TPipe pipe_;
  Matmul<T> matmul_;
  GlobalTensor<T> x_, weight_, y_;
  GlobalTensor<int32_t> offsets_;
};

// gradWeight [groups, n, k] = the sum over a group's rows of grad_y [n] ⊗ x [k], or [groups, k, n] if transposed. The
// gradients of groups without rows are left alone.
template <class T>
class GroupedGemmWeightGradient {
 public:
  __aicore__ inline void Init(GM_ADDR gradY, GM_ADDR x, GM_ADDR offsets, GM_ADDR gradWeight,
                              const GroupedGemmTiling& tiling) {
    tiling_ = tiling;
    // The rows of a weight come from one of the two, its columns from the other.
    first_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(tiling.transposed ? x : gradY));
    second_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(tiling.transposed ? gradY : x));
    gradWeight_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gradWeight));
    offsets_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(offsets), tiling.groups);
    matmul_.Init(pipe_);
  }

  __aicore__ inline void Process() {
    const int64_t height = tiling_.transposed ? tiling_.k : tiling_.n;
    const int64_t width = tiling_.transposed ? tiling_.n : tiling_.k;
    const int64_t down = ceil_div(height, kTile), across = ceil_div(width, kTile);
    for (int64_t group = 0, begin = 0; group < tiling_.groups; ++group) {
      const int64_t end = offsets_.GetValue(group), rows = end - begin;
      for (int64_t tile = 0; rows > 0 && tile < down * across; ++tile) {
        if ((group * down * across + tile) % GetBlockNum() != GetBlockIdx()) continue;
        const int64_t row = tile / across * kTile, column = tile % across * kTile;
        matmul_.Multiply(Operand<T>{first_[begin * height + row], height, true},
                         Operand<T>{second_[begin * width + column], width, false},
                         gradWeight_[(group * height + row) * width + column], width,
                         int32_t(smaller<int64_t>(kTile, height - row)),
                         int32_t(smaller<int64_t>(kTile, width - column)), rows);
      }
      begin = end;
    }
  }

 private:
  GroupedGemmTiling tiling_;
  TPipe pipe_;
  Matmul<T> matmul_;
  GlobalTensor<T> first_, second_, gradWeight_;
  GlobalTensor<int32_t> offsets_;
};

}  // namespace mindspeed::ascend
