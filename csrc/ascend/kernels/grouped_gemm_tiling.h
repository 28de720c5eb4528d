// What the grouped GEMM kernels are given besides their tensors.
#pragma once

#include "tiling.h"

namespace mindspeed::ascend {

struct GroupedGemmTiling {
  int64_t groups, k, n;
  bool transposed;  // weight is [groups, k, n] instead of [groups, n, k]
};

}  // namespace mindspeed::ascend
