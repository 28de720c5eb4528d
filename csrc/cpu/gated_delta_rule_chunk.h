// What the gated delta rule's kernels share: the updates of one chunk of tokens, computed together.
//
// With G the sums of g within the chunk, channel by channel of the keys, the tokens' updates δ solve
//   (1 + A) δ = β (v − (e^G ∘ k) S),   A[i, j] = β_i Σ_c e^(G_ic − G_jc) k_ic k_jc for j < i
// where S is the state before the chunk (Yang et al., 2024, https://arxiv.org/abs/2412.06464). With P the same of q and
// k, j <= i and a scale in the place of β,
//   out = scale (e^G ∘ q) S + P δ   and   S <- e^G_last ∘ S + Σ_j (e^(G_last − G_j) ∘ k_j) δ_jᵀ.
#pragma once

#include "gated_delta_rule_decay.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Where a token's vector of a head lies.
template <class T>
const T* at(const TokenHeads& tensor, int64_t seq, int64_t token, int64_t head) {
  return static_cast<const T*>(tensor.data) + token / seq * tensor.batch + token % seq * tensor.token +
         head * tensor.head;
}

// The chunk's arithmetic: first what value heads with one key head share, then one value head.
template <class T, class Decay>
class Chunk : public ChunkOperands {
 public:
  Chunk(const DeltaRule& problem, Carver& carver)
      : ChunkOperands(problem, carver), decay(problem, carver), problem_(problem) {
    inverse_norms = carver.take(2 * kChunk);
  }

  void load_keys(const ChunkTokens& chunk, int64_t key_head) {
    tokens = chunk;
    k = q + tokens.rows * key_stride;
    load_rows(problem_.q, key_head, problem_.key_dim, q, key_stride);
    load_rows(problem_.k, key_head, problem_.key_dim, k, key_stride);
    if (problem_.l2norm) normalize();
    decay.load_keys(*this);
  }

  // What the head's decays and β make of them. The diagonal of A is not 0, but nobody looks at it.
  void load_head(int64_t value_head) {
    decay.load_head(*this, value_head);
    for (int64_t i = 0; i < tokens.rows; ++i) {
      beta[i] = i < tokens.count ? problem_.beta[(tokens.token + i) * problem_.value_heads + value_head] : 0.0f;
      for (int64_t at = i * kChunkStride; at < i * kChunkStride + round_up(i + 1, kLanes); at += kLanes) {
        store(p + at, problem_.scale * load(qk + at, AllLanes{}), AllLanes{});
        store(a + at, beta[i] * load(kk + at, AllLanes{}), AllLanes{});
      }
    }
  }

  // [chunk, dim] of a tensor in float32, zeros beyond its tokens and its dim.
  void load_rows(const TokenHeads& tensor, int64_t head, int64_t dim, float* rows, int64_t stride) const {
    for (int64_t i = 0; i < tokens.rows; ++i, rows += stride) {
      const T* from = i < tokens.count ? at<T>(tensor, problem_.seq, tokens.token + i, head) : nullptr;
      for_each_vector(dim, [&](int64_t c, auto lanes) {
        store(rows + c, from == nullptr ? Vec{} : load(from + c, lanes), AllLanes{});
      });
    }
  }

  // errors = v − (e^G ∘ k) S and updates = δ, both [chunk, value_dim]; out = scale (e^G ∘ q) S, if asked for.
  void update(int64_t value_head, const float* state, float* errors, float* updates, float* out) {
    load_rows(problem_.v, value_head, problem_.value_dim, errors, value_stride);
    pack_rows(state, value_columns, key_columns, value_columns, packed);
    const int64_t first = out == nullptr ? tokens.rows : 0;
    product(2 * tokens.rows - first, value_columns, {decay.reads(*this) + first * key_stride, key_stride, 1}, packed,
            panel_size(key_columns, kTileColumns), full(key_columns), [&](int64_t row, int64_t column, Vec sum) {
              const int64_t i = row + first - tokens.rows;
              if (i < 0) {
                const float factor = problem_.scale * decay.read_factor(row);
                return store(out + row * value_stride + column, factor * sum, AllLanes{});
              }
              float* error = errors + i * value_stride + column;
              const Vec difference = load(error, AllLanes{}) - decay.read_factor(i) * sum;
              store(error, difference, AllLanes{});
              store(updates + i * value_stride + column, beta[i] * difference, AllLanes{});
            });
    solve(tokens.rows, value_columns, {a, kChunkStride, 1}, updates, value_stride, packed);
  }

  // S <- e^G_last ∘ S + Σ_j (e^(G_last − G_j) ∘ k_j) δ_jᵀ; leaves δ packed.
  void advance(const float* updates, float* state) {
    pack_rows(updates, value_stride, tokens.rows, value_columns, packed);
    product(key_columns, value_columns, {writes, 1, key_stride}, packed, panel_size(tokens.rows, kTileColumns),
            full(tokens.rows), [&](int64_t row, int64_t column, Vec sum) {
              float* element = state + row * value_columns + column;
              store(element, decay.whole(*this, row) * load(element, AllLanes{}) + sum, AllLanes{});
            });
  }

  Decay decay;
  float* inverse_norms;  // [2 · chunk], of q and k

 private:
  void normalize() {
    constexpr float kEps = 1e-6f;
    for (int64_t i = 0; i < 2 * tokens.rows; ++i) {
      float* row = q + i * key_stride;
      const float squares = sum_over(key_columns, [&](int64_t c, auto lanes) {
        const Vec v = load(row + c, lanes);
        return v * v;
      });
      inverse_norms[i] = 1.0f / __builtin_sqrtf(squares + kEps);
      for (int64_t c = 0; c < key_columns; c += kLanes)
        store(row + c, inverse_norms[i] * load(row + c, AllLanes{}), AllLanes{});
    }
  }

  const DeltaRule& problem_;
};

template <class Type>
struct Kind {
  using type = Type;
};

// Calls body(T{}, Kind{}) with the type of the tensors' elements and the kind of decay.
template <class Body>
void with_kind(const DeltaRule& problem, Body&& body) {
  with_type(problem.type, [&](auto element) {
    problem.per_channel ? body(element, Kind<ChannelDecay>{}) : body(element, Kind<HeadDecay>{});
  });
}

// A head's state between memory, [key_dim, value_dim], and the kernel, whole vectors with zeros beyond.
inline void load_state(const DeltaRule& problem, const float* from, float* state) {
  const int64_t columns = round_up(problem.value_dim, kLanes);
  for (int64_t r = 0; r < round_up(problem.key_dim, kLanes); ++r)
    for_each_vector(problem.value_dim, [&](int64_t c, auto lanes) {
      const bool inside = from != nullptr && r < problem.key_dim;
      store(state + r * columns + c, inside ? load(from + r * problem.value_dim + c, lanes) : Vec{}, AllLanes{});
    });
}

inline void store_state(const DeltaRule& problem, const float* state, float* to) {
  const int64_t columns = round_up(problem.value_dim, kLanes);
  for (int64_t r = 0; r < problem.key_dim; ++r)
    for_each_vector(problem.value_dim, [&](int64_t c, auto lanes) {
      store(to + r * problem.value_dim + c, load(state + r * columns + c, AllLanes{}), lanes);
    });
}

inline int64_t state_offset(const DeltaRule& problem, int64_t index, int64_t value_head) {
  return (index * problem.value_heads + value_head) * problem.key_dim * problem.value_dim;
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
