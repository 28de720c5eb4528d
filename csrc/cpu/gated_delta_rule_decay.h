// The decays within a chunk, of both kinds, and the products of queries and keys that they weigh.
//
// All are products of single decays, none the exponential of a difference of sums: none overflows, and long decays cost
// no precision.
#pragma once

#include "gated_delta_rule_operands.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// One decay for all channels of a head: it factors out of the products, which all heads with one key head share.
class HeadDecay {
 public:
  HeadDecay(const DeltaRule& problem, Carver& carver) : problem_(problem) {
    products = carver.take(2 * kChunk * kChunkStride);
    decay = carver.take(kChunk * kChunkStride);
    for (float** row : {&factor_, &growth_}) *row = carver.take(kChunk);
  }

  // For all value heads of the chunk's key head.
  void load_keys(const ChunkOperands& chunk) {
    const int64_t rows = chunk.tokens.rows;
    pack_columns(chunk.k, chunk.key_stride, rows, chunk.key_columns, chunk.packed);
    product(2 * rows, rows, {chunk.q, chunk.key_stride, 1}, chunk.packed, panel_size(chunk.key_columns, kTileColumns),
            full(chunk.key_columns),
            [&](int64_t i, int64_t j, Vec sum) { store(products + i * kChunkStride + j, sum, AllLanes{}); });
  }

  void load_head(const ChunkOperands& chunk, int64_t value_head) {
    const int64_t rows = chunk.tokens.rows;
    load_factors(chunk.tokens, value_head);
    float total = 1.0f;
    for (int64_t i = 0; i < rows; ++i) {
      total *= factor_[i];
      total = total < kVanished ? 0.0f : total;
      float* row = decay + i * kChunkStride;
      for (int64_t j = 0; j < rows; j += kLanes) {
        const Vec d = i == 0 ? Vec{} : load(row - kChunkStride + j, AllLanes{}) * factor_[i];
        store(row + j, without_vanished(d), AllLanes{});
      }
      row[i] = 1.0f;
      growth_[i] = total;
    }
    const float* last = decay + (rows - 1) * kChunkStride;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t at = i * chunk.key_stride; at < i * chunk.key_stride + chunk.key_columns; at += kLanes)
        store(chunk.writes + at, last[i] * load(chunk.k + at, AllLanes{}), AllLanes{});
      for (int64_t at = i * kChunkStride; at < i * kChunkStride + round_up(i + 1, kLanes); at += kLanes) {
        const Vec d = load(decay + at, AllLanes{});
        store(chunk.qk + at, d * load(products + at, AllLanes{}), AllLanes{});
        store(chunk.kk + at, d * load(products + rows * kChunkStride + at, AllLanes{}), AllLanes{});
      }
    }
  }

  // q and, right behind it, k. That e^G multiplies them is left to what is computed of them.
  const float* reads(const ChunkOperands& chunk) const { return chunk.q; }
  float read_factor(int64_t token) const { return growth_[token]; }
  static Vec read_decay(const ChunkOperands&, int64_t, int64_t) { return broadcast(1.0f); }

  Vec tail(const ChunkOperands& chunk, int64_t token, int64_t) const {  // e^(G_last − G)
    return broadcast(decay[(chunk.tokens.rows - 1) * kChunkStride + token]);
  }
  float whole(const ChunkOperands& chunk, int64_t) const { return growth_[chunk.tokens.rows - 1]; }  // e^G_last

  float* products;  // q kᵀ and, right behind it, k kᵀ
  float* decay;     // [chunk, chunk]: e^(G_i − G_j), 0 for j > i

 private:
  void load_factors(const ChunkTokens& tokens, int64_t value_head) {
    for (int64_t i = 0; i < tokens.rows; ++i)
      factor_[i] = i < tokens.count ? problem_.g[(tokens.token + i) * problem_.value_heads + value_head] : 0.0f;
    for (int64_t i = 0; i < tokens.rows; i += kLanes)
      store(factor_ + i, exp(load(factor_ + i, AllLanes{})), AllLanes{});
  }

  const DeltaRule& problem_;
  float *factor_, *growth_;  // [chunk]: e^g, e^G
};

// A decay for each channel (Kimi Linear, 2025, https://arxiv.org/abs/2510.26692). Between tokens of different blocks it
// is the decay up to the later block's start times that from there on, so that their products are matrix products.
// Within a block each pair of tokens has its own.
class ChannelDecay {
 public:
  static constexpr int64_t kBlock = 16;

  ChannelDecay(const DeltaRule& problem, Carver& carver) : problem_(problem) {
    const int64_t stride = row_stride(problem.key_dim);
    factor = carver.take(kChunk * stride);
    near_growth = carver.take(kBlock * stride);
    near = carver.take(2 * kBlock * stride);
    reads_ = carver.take(2 * kChunk * stride);
    for (float** rows : {&growth_, &tail_}) *rows = carver.take(kChunk * stride);
    start_ = carver.take(stride);
  }

  void load_keys(const ChunkOperands&) {}

  void load_head(const ChunkOperands& chunk, int64_t value_head) {
    load_factors(chunk, value_head);
    for (int64_t c = 0; c < chunk.key_columns; c += kLanes) store(start_ + c, broadcast(1.0f), AllLanes{});
    for_each_block(chunk, [&](int64_t begin, int64_t end) {
      multiply_earlier(chunk, begin, end);
      multiply_block(chunk, begin, end);
      for (int64_t i = begin; i < end; ++i)
        for (int64_t c = 0; c < chunk.key_columns; c += kLanes) {
          const Vec growth = load(start_ + c, AllLanes{}) * load(near_row(chunk, i - begin) + c, AllLanes{});
          store(growth_ + i * chunk.key_stride + c, without_vanished(growth), AllLanes{});
        }
      std::copy_n(growth_ + (end - 1) * chunk.key_stride, chunk.key_columns, start_);
    });
    for (int64_t i = 0; i < chunk.tokens.rows; ++i)
      for (int64_t c = 0; c < chunk.key_columns; c += kLanes) {
        const int64_t of_q = i * chunk.key_stride + c, of_k = of_q + chunk.tokens.rows * chunk.key_stride;
        const Vec growth = load(growth_ + of_q, AllLanes{});
        store(reads_ + of_q, growth * load(chunk.q + of_q, AllLanes{}), AllLanes{});
        store(reads_ + of_k, growth * load(chunk.q + of_k, AllLanes{}), AllLanes{});
      }
  }

  // Calls body(begin, end) for each block of tokens, in their order. In it `near_growth` and `near` are the block's,
  // the first `begin` rows of tail() are the decays up to the block's start and those of chunk.writes the keys
  // times that; after the last one they are what their names say.
  template <class Body>
  void for_each_block(const ChunkOperands& chunk, Body&& body) {
    for (int64_t begin = 0; begin < chunk.tokens.rows; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, chunk.tokens.rows);
      load_near(chunk, begin, end);
      body(begin, end);
      extend_tail(chunk, begin, end);
    }
  }

  // e^G q and, right behind it, e^G k, with which nothing is left to be multiplied but their gradients.
  const float* reads(const ChunkOperands&) const { return reads_; }
  static float read_factor(int64_t) { return 1.0f; }
  Vec read_decay(const ChunkOperands& chunk, int64_t token, int64_t column) const {
    return load(growth_ + token * chunk.key_stride + column, AllLanes{});
  }

  Vec tail(const ChunkOperands& chunk, int64_t token, int64_t column) const {  // e^(G_last − G)
    return load(tail_ + token * chunk.key_stride + column, AllLanes{});
  }
  float whole(const ChunkOperands& chunk, int64_t column) const {  // e^G_last
    return growth_[(chunk.tokens.rows - 1) * chunk.key_stride + column];
  }

  float* factor;       // [chunk, key_stride]: e^g
  float* near_growth;  // [block, key_stride]: the decay from the block's start to each of its tokens
  float* near;         // [2 · block, key_stride]: near_growth q and near_growth k of each token, next to each other

 private:
  void load_factors(const ChunkOperands& chunk, int64_t value_head) {
    for (int64_t i = 0; i < chunk.tokens.rows; ++i) {
      const int64_t entry = (chunk.tokens.token + i) * problem_.value_heads + value_head;
      const float* g = i < chunk.tokens.count ? problem_.g + entry * problem_.key_dim : nullptr;
      for_each_vector(problem_.key_dim, [&](int64_t c, auto lanes) {
        const Vec decay = exp(g == nullptr ? Vec{} : load(g + c, lanes));
        store(factor + i * chunk.key_stride + c, without_vanished(decay), AllLanes{});
      });
    }
  }

  float* near_row(const ChunkOperands& chunk, int64_t i) const { return near_growth + i * chunk.key_stride; }

  void load_near(const ChunkOperands& chunk, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < end - begin; ++i)
      for (int64_t c = 0; c < chunk.key_columns; c += kLanes) {
        const int64_t at = (begin + i) * chunk.key_stride + c;
        const Vec one = load(factor + at, AllLanes{});
        const Vec growth = i == 0 ? one : without_vanished(load(near_row(chunk, i - 1) + c, AllLanes{}) * one);
        store(near_row(chunk, i) + c, growth, AllLanes{});
        store(near + 2 * i * chunk.key_stride + c, growth * load(chunk.q + at, AllLanes{}), AllLanes{});
        store(near + (2 * i + 1) * chunk.key_stride + c, growth * load(chunk.k + at, AllLanes{}), AllLanes{});
      }
  }

  void extend_tail(const ChunkOperands& chunk, int64_t begin, int64_t end) {
    const float* block = near_row(chunk, end - begin - 1);
    for (int64_t c = 0; c < chunk.key_columns; c += kLanes) {
      const Vec through = load(block + c, AllLanes{});
      Vec within = broadcast(1.0f);
      for (int64_t j = end - 1; j >= 0; --j) {
        const int64_t at = j * chunk.key_stride + c;
        const Vec tail = j < begin ? without_vanished(load(tail_ + at, AllLanes{}) * through) : within;
        store(tail_ + at, tail, AllLanes{});
        store(chunk.writes + at, tail * load(chunk.k + at, AllLanes{}), AllLanes{});
        within = without_vanished(within * load(factor + at, AllLanes{}));
      }
    }
  }

  // Of the block's queries and keys with the keys of earlier blocks.
  void multiply_earlier(const ChunkOperands& chunk, int64_t begin, int64_t end) {
    if (begin == 0) return;
    pack_columns(chunk.writes, chunk.key_stride, begin, chunk.key_columns, chunk.packed);
    product(2 * (end - begin), begin, {near, chunk.key_stride, 1}, chunk.packed,
            panel_size(chunk.key_columns, kTileColumns), full(chunk.key_columns),
            [&](int64_t row, int64_t column, Vec sum) {
              float* square = row % 2 == 0 ? chunk.qk : chunk.kk;
              store(square + (begin + row / 2) * kChunkStride + column, sum, AllLanes{});
            });
  }

  // Within the block; zeros above the diagonal.
  void multiply_block(const ChunkOperands& chunk, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (float* square : {chunk.qk, chunk.kk}) std::fill_n(square + i * kChunkStride + begin, end - begin, 0.0f);
    for (int64_t j = begin; j < end; ++j) {
      Vec of_q[kBlock] = {}, of_k[kBlock] = {};
      int64_t c = 0;
      for (; c + 4 * kLanes <= chunk.key_columns; c += 4 * kLanes) multiply_key<4>(chunk, j, end, c, of_q, of_k);
      for (; c < chunk.key_columns; c += kLanes) multiply_key<1>(chunk, j, end, c, of_q, of_k);
      for (int64_t i = j; i < end; ++i) {
        chunk.qk[i * kChunkStride + j] = sum(of_q[i - j]);
        chunk.kk[i * kChunkStride + j] = sum(of_k[i - j]);
      }
    }
  }

  // Some channels of the products with key j, while it decays.
  template <int vectors>
  void multiply_key(const ChunkOperands& chunk, int64_t j, int64_t end, int64_t channel, Vec* of_q, Vec* of_k) {
    const int64_t stride = chunk.key_stride;
    Vec key[vectors], decay[vectors];
    for (int v = 0; v < vectors; ++v) {
      key[v] = load(chunk.k + j * stride + channel + v * kLanes, AllLanes{});
      decay[v] = broadcast(1.0f);
    }
    for (int64_t i = j; i < end; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const int64_t at = i * stride + channel + v * kLanes;
        if (i > j) decay[v] = without_vanished(decay[v] * load(factor + at, AllLanes{}));
        const Vec decayed = decay[v] * key[v];
        of_q[i - j] += decayed * load(chunk.q + at, AllLanes{});
        of_k[i - j] += decayed * load(chunk.k + at, AllLanes{});
      }
  }

  const DeltaRule& problem_;
  float* reads_;           // [2 · chunk, key_stride]
  float *growth_, *tail_;  // [chunk, key_stride]: e^G, e^(G_last − G)
  float* start_;           // [key_stride]: the decay up to the block's start
};

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
