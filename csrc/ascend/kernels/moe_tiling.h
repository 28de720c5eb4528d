// What the kernels of MoE rows are given besides their tensors.
#pragma once

#include "tiling.h"

namespace mindspeed::ascend {

struct MoeTiling {
  int64_t rows;  // sorted rows, or tokens where a kernel goes through them
  int64_t hidden, top_k;
  int32_t columns;  // of a part of a row
  bool weighted;

  BOTH_SIDES constexpr int64_t parts() const { return ceil_div(hidden, columns); }
};

// Rows of float32 and of T that a kernel keeps in local memory, its queues twice.
struct MoeFootprint {
  int64_t floats, values;
};

constexpr MoeFootprint kMoePermute{0, 3}, kMoeUnpermute{2, 4}, kMoeUnpermuteBackward{3, 6};

inline int32_t moe_columns(int64_t hidden, int64_t element_bytes, const MoeFootprint& rows) {
  const int64_t fits = kUnifiedBufferBudget / (4 * rows.floats + element_bytes * rows.values);
  return int32_t(smaller(round_up(hidden, kRowElements), fits / kRowElements * kRowElements));
}

}  // namespace mindspeed::ascend
