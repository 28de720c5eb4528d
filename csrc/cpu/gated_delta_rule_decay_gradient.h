// From the gradients of the products of queries and keys, weighed by decays, those of queries, keys and decays.
//
// The decay between two tokens, G_i − G_j, is that of the tokens after j up to i: what it contributes is summed into
// those only, not into the gradients of G_i and G_j, of which most would cancel in the sums that g's gradient is.
#pragma once

#include "gated_delta_rule_decay.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// The gradients of qk and kk, row by row next to each other: [chunk, 2, chunk]. Those of j > i are 0 or not read.
constexpr int64_t kPairStride = 2 * kChunkStride;

// What a chunk's gradients of normalised queries and keys are added to, of all value heads with the chunk's key head.
struct KeyGradients {
  float *q, *k;  // [chunk, key_stride], k right behind q
};

inline void add_to(float* element, Vec part) { store(element, load(element, AllLanes{}) + part, AllLanes{}); }

template <int... lane>
Vec first_lanes(Vec v, int64_t count, std::integer_sequence<int, lane...>) {
  const Vec index = {lane...};
  return index < static_cast<float>(count) ? v : Vec{};
}

// The first `count` lanes of v, 0 in the others.
inline Vec first_lanes(Vec v, int64_t count) {
  return first_lanes(v, count, std::make_integer_sequence<int, kLanes>{});
}

// To each row of `sums`: the rows of `terms` before it, and `first`; the rows of `terms` from it on.
inline void add_prefixes(int64_t rows, int64_t columns, int64_t stride, const float* terms, const float* first,
                         float* sums) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Vec total = first == nullptr ? Vec{} : load(first + c, AllLanes{});
    for (int64_t at = c; at < rows * stride; at += stride) {
      add_to(sums + at, total);
      total += load(terms + at, AllLanes{});
    }
  }
}
inline void add_suffixes(int64_t rows, int64_t columns, int64_t stride, const float* terms, float* sums) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Vec total = {};
    for (int64_t at = (rows - 1) * stride + c; at >= 0; at -= stride) {
      total += load(terms + at, AllLanes{});
      add_to(sums + at, total);
    }
  }
}

class HeadDecayGradient {
 public:
  HeadDecayGradient(const DeltaRule&, Carver& carver) {
    for (float** square : {&grad_qk_, &grad_kk_}) *square = carver.take(kChunk * kChunkStride);
    for (float** row : {&later_, &g_}) *row = carver.take(kChunk);
    for (float** rows : {&reads_, &writes_}) *rows = carver.take(kChunk * kLanes);
  }

  void begin_keys(const ChunkOperands& chunk) {
    for (float* square : {grad_qk_, grad_kk_}) std::fill_n(square, chunk.tokens.rows * kChunkStride, 0.0f);
  }

  // Of the logarithms of the decays of a head's reads, writes and whole state, until finish_state.
  void begin_head(const ChunkOperands& chunk) {
    for (float* rows : {reads_, writes_}) std::fill_n(rows, chunk.tokens.rows * kLanes, 0.0f);
    whole_ = 0.0f;
  }
  void add_read(const ChunkOperands&, int64_t token, int64_t, Vec part) { add_to(reads_ + token * kLanes, part); }
  void add_write(const ChunkOperands&, int64_t token, int64_t, Vec part) { add_to(writes_ + token * kLanes, part); }
  void add_whole(int64_t, float part) { whole_ += part; }

  void finish_state(const ChunkOperands& chunk) {
    float earlier = whole_, later = 0.0f;
    for (int64_t i = 0; i < chunk.tokens.rows; ++i) {
      g_[i] = earlier;
      earlier += sum(load(writes_ + i * kLanes, AllLanes{}));
    }
    for (int64_t i = chunk.tokens.rows - 1; i >= 0; --i) g_[i] += later += sum(load(reads_ + i * kLanes, AllLanes{}));
  }

  void add_pairs(const ChunkOperands& chunk, const HeadDecay& decay, const float* pairs, KeyGradients) {
    std::fill_n(later_, chunk.tokens.rows, 0.0f);
    for (int64_t i = chunk.tokens.rows - 1; i >= 0; --i) {
      Vec earlier = {};
      for (int64_t j = 0; j <= i; j += kLanes) {
        const int64_t at = i * kChunkStride + j;
        const Vec d = load(decay.decay + at, AllLanes{});
        const Vec grad_qk = load(pairs + i * kPairStride + j, AllLanes{});
        const Vec grad_kk = load(pairs + i * kPairStride + kChunkStride + j, AllLanes{});
        add_to(grad_qk_ + at, d * grad_qk);
        add_to(grad_kk_ + at, d * grad_kk);
        const Vec of_log = grad_qk * load(chunk.qk + at, AllLanes{}) + grad_kk * load(chunk.kk + at, AllLanes{});
        add_to(later_ + j, of_log);
        earlier += first_lanes(load(later_ + j, AllLanes{}), i - j);
      }
      g_[i] += sum(earlier);
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

  void store_head(const ChunkOperands& chunk, float* to, int64_t token_stride, int64_t /*channels*/) const {
    for (int64_t i = 0; i < chunk.tokens.count; ++i) to[i * token_stride] = g_[i];
  }

 private:
  float *grad_qk_, *grad_kk_;  // [chunk, chunk]: of q kᵀ and k kᵀ
  float* later_;               // [chunk]: of the decays from a token to the present one and those after it
  float* g_;                   // [chunk]: of g
  float *reads_, *writes_;     // [chunk, lanes]: of the logarithms of e^G and e^(G_last − G)
  float whole_;                // of the logarithm of e^G_last
};

class ChannelDecayGradient {
 public:
  ChannelDecayGradient(const DeltaRule& problem, Carver& carver) {
    const int64_t stride = row_stride(problem.key_dim);
    near_ = carver.take(ChannelDecay::kBlock * stride);
    for (float** rows : {&far_, &g_, &reads_, &writes_}) *rows = carver.take(kChunk * stride);
    whole_ = carver.take(stride);
  }

  void begin_keys(const ChunkOperands&) {}
  void finish_keys(const ChunkOperands&, KeyGradients) {}

  // Of the logarithms of the decays of a head's reads, writes and whole state, until finish_state.
  void begin_head(const ChunkOperands& chunk) {
    for (float* rows : {g_, reads_}) std::fill_n(rows, chunk.tokens.rows * chunk.key_stride, 0.0f);
  }
  void add_read(const ChunkOperands& chunk, int64_t token, int64_t column, Vec part) {
    add_to(reads_ + token * chunk.key_stride + column, part);
  }
  void add_write(const ChunkOperands& chunk, int64_t token, int64_t column, Vec part) {
    store(writes_ + token * chunk.key_stride + column, part, AllLanes{});
  }
  void add_whole(int64_t column, float part) { whole_[column] = part; }

  void finish_state(const ChunkOperands& chunk) {
    add_prefixes(chunk.tokens.rows, chunk.key_columns, chunk.key_stride, writes_, whole_, g_);
    add_suffixes(chunk.tokens.rows, chunk.key_columns, chunk.key_stride, reads_, g_);
  }

  void add_pairs(const ChunkOperands& chunk, ChannelDecay& decay, const float* pairs, KeyGradients grads) {
    decay.for_each_block(chunk, [&](int64_t begin, int64_t end) {
      if (begin > 0) add_earlier(chunk, decay, pairs, grads, begin, end);
      for (int64_t c = 0; c < chunk.key_columns; c += kLanes) add_block(chunk, decay, pairs, grads, begin, end, c);
    });
  }

  void store_head(const ChunkOperands& chunk, float* to, int64_t token_stride, int64_t channels) const {
    for (int64_t i = 0; i < chunk.tokens.count; ++i)
      for_each_vector(channels, [&](int64_t c, auto lanes) {
        store(to + i * token_stride + c, load(g_ + i * chunk.key_stride + c, AllLanes{}), lanes);
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
              float* of_log = near_ + row / 2 * stride + column;
              const Vec part = load(decay.near_growth + row / 2 * stride + column, AllLanes{}) * sum;
              if (row % 2 == 0) {
                add_to(grads.q + at, part);
                store(of_log, part * load(chunk.q + at, AllLanes{}), AllLanes{});
              } else {
                add_to(grads.k + at, part);
                add_to(of_log, part * load(chunk.k + at, AllLanes{}));
              }
            });
    pack_rows(decay.near, stride, units, columns, chunk.packed);
    product(begin, columns, {block, 1, kChunkStride}, chunk.packed, panel_size(units, kTileColumns), full(units),
            [&](int64_t row, int64_t column, Vec sum) {
              const int64_t at = row * stride + column;
              const Vec part = decay.tail(chunk, row, column) * sum;
              add_to(grads.k + at, part);
              store(far_ + at, part * load(chunk.k + at, AllLanes{}), AllLanes{});
            });
    add_prefixes(begin, columns, stride, far_, nullptr, g_);
    add_suffixes(end - begin, columns, stride, near_, g_ + begin * stride);
  }

  // The pairs within a block, of one vector of channels.
  void add_block(const ChunkOperands& chunk, const ChannelDecay& decay, const float* pairs, KeyGradients grads,
                 int64_t begin, int64_t end, int64_t channel) {
    const int64_t stride = chunk.key_stride;
    for (int64_t j = begin; j < end; ++j) {
      const Vec key = load(chunk.k + j * stride + channel, AllLanes{});
      const float of_itself = pairs[j * kPairStride + j];
      Vec growth = broadcast(1.0f), of_key = {}, of_log[ChannelDecay::kBlock];
      for (int64_t i = j + 1; i < end; ++i) {
        const int64_t at = i * stride + channel;
        const float of_qk = pairs[i * kPairStride + j], of_kk = pairs[i * kPairStride + kChunkStride + j];
        growth = without_vanished(growth * load(decay.factor + at, AllLanes{}));
        const Vec decayed = growth * key;
        const Vec other = of_qk * load(chunk.q + at, AllLanes{}) + of_kk * load(chunk.k + at, AllLanes{});
        add_to(grads.q + at, of_qk * decayed);
        add_to(grads.k + at, of_kk * decayed);
        of_log[i - begin] = other * decayed;
        of_key += other * growth;
      }
      const int64_t at = j * stride + channel;
      add_to(grads.q + at, of_itself * key);
      add_to(grads.k + at, of_itself * load(chunk.q + at, AllLanes{}) + of_key);
      Vec later = {};
      for (int64_t i = end - 1; i > j; --i) {
        later += of_log[i - begin];
        add_to(g_ + i * stride + channel, later);
      }
    }
  }

  float* near_;  // [block, key_stride]: of the logarithms of a block's near_growth, by the pairs with earlier tokens
  float* far_;   // [chunk, key_stride]: of those of the decays from earlier tokens to the block
  float* g_;     // [chunk, key_stride]: of g
  float *reads_, *writes_,
      *whole_;  // of the logarithms of e^G and e^(G_last − G), [chunk, key_stride], and of e^G_last
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
