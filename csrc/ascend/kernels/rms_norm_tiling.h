// What the RMSNorm kernels are given besides their tensors.
#pragma once

#include "tiling.h"

namespace mindspeed::ascend {

struct RmsNormTiling {
  Tiles tiles;
  float eps;  // forward
  bool has_weight;
  bool round_before_weight;  // x̂ is rounded to x's type before it meets the weight
  bool has_residual;         // forward: added to x first. Backward: a gradient that flows into x besides
  bool weight_gradient;      // backward
};

// Backward keeps the weight's gradient of a core in its unified buffer.
constexpr int64_t kRmsNormMaxHidden = 24 << 10;
constexpr int32_t kRmsNormPartialSums = 512;  // of another core's, in one go

// The tiles of forward, which queues x, residual, sum and y, or of backward, which queues grad_y, x or grad_sum, and
// grad_x.
inline Tiles rms_norm_tiles(int64_t rows, int64_t hidden, int64_t x_bytes, int64_t y_bytes, bool has_residual,
                            bool backward, int64_t cores) {
  const int64_t scalars_of_row = 80, weight = 4;
  if (!backward) {
    const int64_t queued = x_bytes * (has_residual ? 3 : 1) + y_bytes;
    return tile(rows, hidden, {queued, 2 * 4, scalars_of_row, weight}, cores);
  }
  const int64_t queued = y_bytes + x_bytes * 2;
  const int64_t sums = 4 * round_up(hidden, kRowElements) + 2 * 4 * kRmsNormPartialSums;
  return tile(rows, hidden, {queued, 3 * 4, scalars_of_row, weight, sums}, cores);
}

}  // namespace mindspeed::ascend
