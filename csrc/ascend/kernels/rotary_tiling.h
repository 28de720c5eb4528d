// What the rotary kernel is given besides its tensors.
#pragma once

#include "tiling.h"

namespace mindspeed::ascend {

struct HeadStrides {
  int64_t batch, head, seq;  // in elements; along head_dim it is 1

  BOTH_SIDES constexpr int64_t at(int64_t b, int64_t h, int64_t s) const { return b * batch + h * head + s * seq; }
};

// q or k: [batch, count, seq, head_dim]
struct RotaryHeads {
  int64_t count;
  HeadStrides in, out;
};

struct RotaryTiling {
  int64_t batch, seq, head_dim, rotary_dim;
  int64_t angle_batch_stride;  // 0 if all sequences have the same angles
  bool interleaved, transposed;
  RotaryHeads q, k;
  int32_t heads;  // of a tile

  BOTH_SIDES constexpr int64_t half_dim() const { return rotary_dim / 2; }
  BOTH_SIDES constexpr int64_t rest() const { return head_dim - rotary_dim; }
};

// Parts of a head in local memory, in elements: half of what is rotated, all of it, and what passes.
struct RotaryWidths {
  int32_t half_dim, pairs, rest;

  BOTH_SIDES constexpr RotaryWidths(const RotaryTiling& tiling, int64_t multiple)
      : half_dim(int32_t(round_up(tiling.half_dim(), multiple))),
        pairs(int32_t(round_up(tiling.rotary_dim, multiple))),
        rest(int32_t(round_up(tiling.rest(), multiple))) {}
};

constexpr int64_t kRotaryMaxDim = 1024;

// How many heads fit; 0 if not even one does.
inline int32_t rotary_heads(const RotaryTiling& tiling, int64_t in_bytes, int64_t angle_bytes, int64_t out_bytes) {
  const RotaryWidths widths(tiling, kRowElements);
  const int64_t queued = 2 * (in_bytes + out_bytes) * (2 * widths.half_dim + widths.rest);
  const int64_t scratch = 4 * (6 * widths.half_dim + widths.rest);
  const int64_t angles =
      2 * 2 * angle_bytes * 2 * widths.half_dim + 4 * 4 * widths.half_dim + 4 * (widths.half_dim + widths.pairs);
  return int32_t(smaller<int64_t>(255, larger<int64_t>(0, (kUnifiedBufferBudget - angles) / (queued + scratch))));
}

}  // namespace mindspeed::ascend
