// What the vector cores do to tiles of attention scores, forward and backward: rows of kAttentionKeys floats.
#pragma once

#include "common.h"
#include "flash_attention_tiling.h"

namespace mindspeed::ascend {

// What a masked score is, and below it nothing: a row's maximum starts above it, so that masked scores vanish even
// while no visible key has come.
constexpr float kMasked = -2e30f, kNoMaximum = -1e30f;

// rows [r] *= numbers[r], whose blocks are `factors`. 64 columns at a time, a row per repeat.
__aicore__ inline void ScaleRows(const LocalTensor<float>& rows, const LocalTensor<float>& factors, int32_t count,
                                 int32_t width) {
  const uint8_t next = uint8_t(width / kFloatsPerBlock);
  for (int32_t column = 0; column < width; column += kFloatsPerRepeat) {
    const uint64_t columns = smaller(kFloatsPerRepeat, width - column);
    Mul(rows[column], rows[column], factors, columns, uint8_t(count), {1, 1, 0, next, next, 1});
  }
}

// rows [r] −= numbers[r]
__aicore__ inline void SubtractFromRows(const LocalTensor<float>& rows, const LocalTensor<float>& numbers,
                                        int32_t count, int32_t width) {
  const uint8_t next = uint8_t(width / kFloatsPerBlock);
  for (int32_t column = 0; column < width; column += kFloatsPerRepeat) {
    const uint64_t columns = smaller(kFloatsPerRepeat, width - column);
    Sub(rows[column], rows[column], numbers, columns, uint8_t(count), {1, 1, 0, next, next, 1});
  }
}

// Sets the elements of a row of scores outside of [begin, end) to `value`.
__aicore__ inline void FillOutside(const LocalTensor<float>& row, int64_t begin, int64_t end, float value) {
  for (int32_t column = 0; column < kAttentionKeys; column += kFloatsPerRepeat) {
    uint64_t outside[2] = {0, 0};
    for (int32_t i = 0; i < kFloatsPerRepeat; ++i) {
      if (column + i < begin || column + i >= end) outside[0] |= uint64_t(1) << i;
    }
    if (outside[0] != 0) Duplicate(row[column], value, outside, 1, 1, 8);
  }
}

// Masks the keys that a row of scores does not see. Row r sits at key `position + r` of the tile.
__aicore__ inline void MaskScores(const AttentionTiling& tiling, const LocalTensor<float>& scores, int64_t position,
                                  int32_t rows, int32_t columns) {
  for (int32_t r = 0; r < rows; ++r) {
    int64_t begin = 0, end = columns;
    if (tiling.causal) end = smaller(end, position + r + 1);
    if (tiling.window > 0) {
      begin = position + r - tiling.window + 1;
      end = smaller(end, position + r + tiling.window);
    }
    if (begin > 0 || end < columns) FillOutside(scores[r * kAttentionKeys], begin, end, kMasked);
  }
  PipeBarrier<PIPE_V>();
}

// Scores to (1 − tanh x) / 2 = 1 / (exp(2x) + 1), x = scale · score / softcap. `ones` is a block of them.
__aicore__ inline void HalfTanhComplement(const AttentionTiling& tiling, const LocalTensor<float>& scores,
                                          const LocalTensor<float>& ones, int32_t count) {
  Muls(scores, scores, 2 * tiling.scale / tiling.softcap, count);
  PipeBarrier<PIPE_V>();
  Exp(scores, scores, count);
  PipeBarrier<PIPE_V>();
  Adds(scores, scores, 1.0f, count);
  PipeBarrier<PIPE_V>();
  Div(scores, ones, scores, uint64_t(kFloatsPerRepeat), uint8_t(count / kFloatsPerRepeat), {1, 0, 1, 8, 0, 8});
  PipeBarrier<PIPE_V>();
}

// Scores to logits: scale · score, or softcap · tanh x, exact to a rounding of the softcap.
__aicore__ inline void ScoresToLogits(const AttentionTiling& tiling, const LocalTensor<float>& scores,
                                      const LocalTensor<float>& ones, int32_t count) {
  if (tiling.softcap == 0) {
    Muls(scores, scores, tiling.scale, count);
  } else {
    HalfTanhComplement(tiling, scores, ones, count);
    Muls(scores, scores, -2 * tiling.softcap, count);
    PipeBarrier<PIPE_V>();
    Adds(scores, scores, tiling.softcap, count);
  }
  PipeBarrier<PIPE_V>();
}

// The same backward. Gradients of logits become those of scale · score, or, with a softcap, a quarter of them:
// 1 − tanh² = 4 r (1 − r) with r = (1 − tanh) / 2.
__aicore__ inline void ScoresToLogits(const AttentionTiling& tiling, const LocalTensor<float>& scores,
                                      const LocalTensor<float>& gradients, const LocalTensor<float>& ones,
                                      int32_t count) {
  if (tiling.softcap == 0) return ScoresToLogits(tiling, scores, ones, count);
  HalfTanhComplement(tiling, scores, ones, count);
  Mul(gradients, gradients, scores, count);
  PipeBarrier<PIPE_V>();
  Muls(scores, scores, -1.0f, count);
  PipeBarrier<PIPE_V>();
  Adds(scores, scores, 1.0f, count);
  PipeBarrier<PIPE_V>();
  Mul(gradients, gradients, scores, count);
  PipeBarrier<PIPE_V>();
  Muls(scores, scores, 2 * tiling.softcap, count);
  PipeBarrier<PIPE_V>();
  Adds(scores, scores, -tiling.softcap, count);
  PipeBarrier<PIPE_V>();
}

}  // namespace mindspeed::ascend
