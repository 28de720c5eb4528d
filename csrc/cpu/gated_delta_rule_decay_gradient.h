// From the gradients of the products of queries and keys, weighed by decays, those of queries, keys and decays.
#pragma once

#include "gated_delta_rule_decay.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// The gradients of qk and kk, row by row next to each other: [chunk, 2, chunk]. Those of j > i are 0 or not read.
constexpr int64_t kPairStride = 2 * kChunkStride;

// What a chunk's gradients are added to.
struct KeyGradients {
  float *q, *k;  // [chunk, key_stride]: normalised; of all value heads with the chunk's key head
  float* log;    // [chunk, key_stride]: of G, of one value head
};

inline void add_to(float* element, Vec part) { store(element, load(element, AllLanes{}) + part, AllLanes{}); }

class HeadDecayGradient {
 public:
  HeadDecayGradient(const DeltaRule&, Carver& carver) {
    for (float** square : {&grad_qk_, &grad_kk_}) *square = carver.take(kChunk * kChunkStride);
    log_ = carver.take(kChunk);
  }

  void begin_keys(const ChunkOperands& chunk) {
    for (float* square : {grad_qk_, grad_kk_}) std::fill_n(square, chunk.tokens.rows * kChunkStride, 0.0f);
  }

  void add_pairs(const ChunkOperands& chunk, const HeadDecay& decay, const float* pairs, KeyGradients) {
    std::fill_n(log_, chunk.tokens.rows, 0.0f);
    for (int64_t i = 0; i < chunk.tokens.rows; ++i) {
      Vec of_row = {};
      for (int64_t j = 0; j <= i; j += kLanes) {
        const int64_t at = i * kChunkStride + j;
        const Vec d = load(decay.decay + at, AllLanes{});
        const Vec grad_qk = load(pairs + i * kPairStride + j, AllLanes{});
        const Vec grad_kk = load(pairs + i * kPairStride + kChunkStride + j, AllLanes{});
        add_to(grad_qk_ + at, d * grad_qk);
        add_to(grad_kk_ + at, d * grad_kk);
        const Vec of_log = grad_qk * load(chunk.qk + at, AllLanes{}) + grad_kk * load(chunk.kk + at, AllLanes{});
        of_row += of_log;  // of G_i − G_j
        add_to(log_ + j, -of_log);
      }
      log_[i] += sum(of_row);
    }
  }

  // Of all value heads together.
  void finish_keys(const ChunkOperands& chunk, KeyGradients grads) {
    const int64_t rows = chunk.tokens.rows, columns = chunk.key_columns, stride = chunk.key_stride;
    const int64_t panel = panel_size(rows, kTileColumns);
    const auto add_rows = [stride](float* grad) {
      return [grad, stride](int64_t row, int64_t column, Vec sum) { add_to(grad + row * stride + column, sum); };
    };
    pack_rows(chunk.k, stride, rows, columns, chunk.packed);
    product(rows, columns, {grad_qk_, kChunkStride, 1}, chunk.packed, panel, lower(rows), add_rows(grads.q));
    product(rows, columns, {grad_kk_, kChunkStride, 1}, chunk.packed, panel, lower(rows), add_rows(grads.k));
    product(rows, columns, {grad_kk_, 1, kChunkStride}, chunk.packed, panel, upper(rows), add_rows(grads.k));
    pack_rows(chunk.q, stride, rows, columns, chunk.packed);
    product(rows, columns, {grad_qk_, 1, kChunkStride}, chunk.packed, panel, upper(rows), add_rows(grads.k));
  }

  // G is the sum of g up to a token: the gradient of g is the sum of G's from that token on.
  void store_head(const ChunkOperands& chunk, const float* grad_log, float* grad_g, int64_t token_stride,
                  int64_t /*channels*/) const {
    float total = 0.0f;
    for (int64_t i = chunk.tokens.rows - 1; i >= 0; --i) {
      const float* row = grad_log + i * chunk.key_stride;
      total += log_[i] + sum_over(chunk.key_columns, [&](int64_t c, auto lanes) { return load(row + c, lanes); });
      if (i < chunk.tokens.count) grad_g[i * token_stride] = total;
    }
  }

 private:
  float *grad_qk_, *grad_kk_;  // [chunk, chunk]: of q kᵀ and k kᵀ
  float* log_;                 // [chunk]: of G, the part of all channels together
};

class ChannelDecayGradient {
 public:
  ChannelDecayGradient(const DeltaRule&, Carver&) {}

  void begin_keys(const ChunkOperands&) {}
  void finish_keys(const ChunkOperands&, KeyGradients) {}

  void add_pairs(const ChunkOperands& chunk, ChannelDecay& decay, const float* pairs, KeyGradients grads) {
    decay.for_each_block(chunk, [&](int64_t begin, int64_t end) {
      if (begin > 0) add_earlier(chunk, decay, pairs, grads, begin, end);
      for (int64_t c = 0; c < chunk.key_columns; c += kLanes) add_block(chunk, decay, pairs, grads, begin, end, c);
    });
  }

  void store_head(const ChunkOperands& chunk, const float* grad_log, float* grad_g, int64_t token_stride,
                  int64_t channels) const {
    for_each_vector(channels, [&](int64_t c, auto lanes) {
      Vec total = {};
      for (int64_t i = chunk.tokens.rows - 1; i >= 0; --i) {
        total += load(grad_log + i * chunk.key_stride + c, AllLanes{});
        if (i < chunk.tokens.count) store(grad_g + i * token_stride + c, total, lanes);
      }
    });
  }

 private:
  // The pairs of a block's tokens with those before the block: products with what decays up to the block's start.
  void add_earlier(const ChunkOperands& chunk, const ChannelDecay& decay, const float* pairs, KeyGradients grads,
                   int64_t begin, int64_t end) {
    const int64_t stride = chunk.key_stride, columns = chunk.key_columns, units = 2 * (end - begin);
    const float* block = pairs + begin * kPairStride;
    pack_rows(chunk.writes, stride, begin, columns, chunk.packed);
    product(units, columns, {block, kChunkStride, 1}, chunk.packed, panel_size(begin, kTileColumns), full(begin),
            [&](int64_t row, int64_t column, Vec sum) {
              const int64_t at = (begin + row / 2) * stride + column;
              const Vec part = load(decay.near_growth + row / 2 * stride + column, AllLanes{}) * sum;
              add_to((row % 2 == 0 ? grads.q : grads.k) + at, part);
              add_to(grads.log + at, part * load((row % 2 == 0 ? chunk.q : chunk.k) + at, AllLanes{}));
            });
    pack_rows(decay.near, stride, units, columns, chunk.packed);
    product(begin, columns, {block, 1, kChunkStride}, chunk.packed, panel_size(units, kTileColumns), full(units),
            [&](int64_t row, int64_t column, Vec sum) {
              const int64_t at = row * stride + column;
              const Vec part = load(chunk.tail + at, AllLanes{}) * sum;
              add_to(grads.k + at, part);
              add_to(grads.log + at, -part * load(chunk.k + at, AllLanes{}));
            });
  }

  // The pairs within a block, of one vector of channels.
  void add_block(const ChunkOperands& chunk, const ChannelDecay& decay, const float* pairs, KeyGradients grads,
                 int64_t begin, int64_t end, int64_t channel) {
    const int64_t stride = chunk.key_stride;
    for (int64_t j = begin; j < end; ++j) {
      const Vec key = load(chunk.k + j * stride + channel, AllLanes{});
      const float of_itself = pairs[j * kPairStride + j];
      Vec growth = broadcast(1.0f), of_key = {};
      for (int64_t i = j + 1; i < end; ++i) {
        const int64_t at = i * stride + channel;
        const float of_qk = pairs[i * kPairStride + j], of_kk = pairs[i * kPairStride + kChunkStride + j];
        growth = without_vanished(growth * load(decay.factor + at, AllLanes{}));
        const Vec decayed = growth * key;
        const Vec other = of_qk * load(chunk.q + at, AllLanes{}) + of_kk * load(chunk.k + at, AllLanes{});
        add_to(grads.q + at, of_qk * decayed);
        add_to(grads.k + at, of_kk * decayed);
        add_to(grads.log + at, other * decayed);
        of_key += other * growth;
      }
      const int64_t at = j * stride + channel;
      add_to(grads.q + at, of_itself * key);
      add_to(grads.k + at, of_itself * load(chunk.q + at, AllLanes{}) + of_key);
      add_to(grads.log + at, -key * of_key);
    }
  }
};

template <class Decay>
struct GradientOf;
template <>
struct GradientOf<HeadDecay> {
  using type = HeadDecayGradient;
};
template <>
struct GradientOf<ChannelDecay> {
  using type = ChannelDecayGradient;
};

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
