// One chunk of tokens as the gated delta rule's kernels hold it: what is loaded, and what its decays make of that.
#pragma once

#include "common/float_buffer.h"
#include "common/vec_math.h"
#include "gated_delta_rule_products.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// A chunk of one sequence: the tokens from `token` on, `count` of them, and zeros up to `rows`, whole vectors.
struct ChunkTokens {
  int64_t token, count, rows;
};

inline ChunkTokens chunk_of(const Sequence& sequence, int64_t chunk) {
  const int64_t token = sequence.begin + chunk * kChunk, count = std::min(kChunk, sequence.end - token);
  return {token, count, round_up(count, kLanes)};
}

inline int64_t chunks_of(const Sequence& sequence) { return (sequence.end - sequence.begin + kChunk - 1) / kChunk; }

// With G the sums of g within the chunk, a row for each token and a column for each channel of the keys.
struct ChunkOperands {
  ChunkOperands(const DeltaRule& problem, Carver& carver)
      : key_columns(round_up(problem.key_dim, kLanes)),
        value_columns(round_up(problem.value_dim, kLanes)),
        key_stride(row_stride(problem.key_dim)),
        value_stride(row_stride(problem.value_dim)) {
    const int64_t longest = std::max(std::max(key_columns, value_columns), 2 * kChunk);
    packed = carver.take(packed_size(longest, longest, kTileColumns));
    q = carver.take(2 * kChunk * key_stride);
    writes = carver.take(kChunk * key_stride);
    for (float** square : {&qk, &kk, &a, &p}) *square = carver.take(kChunk * kChunkStride);
    beta = carver.take(kChunk);
  }

  int64_t state_size() const { return key_columns * value_columns; }

  int64_t key_columns, value_columns, key_stride, value_stride;
  ChunkTokens tokens;
  float *q, *k;    // [chunk, key_stride], k right behind q
  float* writes;   // [chunk, key_stride]: e^(G_last − G) k
  float *qk, *kk;  // [chunk, chunk]: Σ_c e^(G_ic − G_jc) q_ic k_jc and the same of k and k, for j <= i
  float *a, *p;    // A = β kk, and P = scale · qk
  float* beta;     // [chunk]
  float* packed;   // the right operand of the product at hand
};

// What has decayed below any effect is 0. Arithmetic with subnormal numbers is slow: no product of two decays is one.
constexpr float kVanished = 0x1p-60f;
inline Vec without_vanished(Vec decay) { return decay < kVanished ? Vec{} : decay; }

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
