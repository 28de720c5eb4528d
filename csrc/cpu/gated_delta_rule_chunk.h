// What the gated delta rule's kernels share: the updates of one chunk of tokens, computed together.
//
// With G the sums of g within the chunk and D[i, j] = e^(G_i − G_j) for j <= i, the tokens' updates δ solve
//   (1 + A) δ = β (v − e^G k S),   A[i, j] = β_i D[i, j] k_i·k_j for j < i
// where S is the state before the chunk (Yang et al., 2024, https://arxiv.org/abs/2412.06464). Then
//   out = scale (e^G q S + (D ∘ q kᵀ) δ)   and   S <- e^G_last S + Σ_j e^(G_last − G_j) k_j δ_jᵀ.
// D is a product of decays, not an exponential of sums, so that long decays cost no precision.
#pragma once

#include <algorithm>

#include "common/float_buffer.h"
#include "common/gemm_panels.h"
#include "common/vec_math.h"
#include "gated_delta_rule.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr int64_t kChunk = DeltaRule::kChunk;
constexpr int64_t kChunkStride = kChunk + kLanes;  // between rows of [chunk, chunk]

// Rows are some vectors more than `length` apart, so that they do not compete for the same sets of the cache.
constexpr int64_t row_stride(int64_t length) { return round_up(length, kLanes) + kLanes; }

// The part of the depth that matters to a tile of rows.
struct Units {
  int64_t begin, end;
};

// C [rows, columns] = A · B; B packed in panels `panel` apart. finish(row, column, sum) takes kLanes sums.
template <class Depth, class Finish>
void product(int64_t rows, int64_t columns, LeftOperand a, const float* b, int64_t panel, Depth&& depth,
             Finish&& finish) {
  for (int64_t j = 0; j < columns; j += kTileColumns, b += panel)
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const Units units = depth(i);
      const LeftOperand part = {a.data + i * a.row_stride + units.begin * a.unit_stride, a.row_stride, a.unit_stride};
      multiply<float>((columns - j + kLanes - 1) / kLanes, units.end - units.begin, part,
                      b + units.begin * kTileColumns,
                      [&](int r, int v, Vec sum) { finish(i + r, j + v * kLanes, sum); });
    }
}

// A full left operand; lower triangular with its diagonal; upper triangular.
inline auto full(int64_t depth) {
  return [depth](int64_t) { return Units{0, depth}; };
}
inline auto lower(int64_t depth) {
  return [depth](int64_t row) { return Units{0, std::min(row + kTileRows, depth)}; };
}
inline auto upper(int64_t depth) {
  return [depth](int64_t row) { return Units{row, depth}; };
}

// Rows [depth, columns] as the B of a product, and as Bᵀ.
inline void pack_rows(const float* rows, int64_t stride, int64_t depth, int64_t columns, float* packed) {
  pack<float, kTileColumns>(Matrix<float>{rows, stride}.transpose(), columns, depth, packed);
}
inline void pack_columns(const float* rows, int64_t stride, int64_t columns, int64_t depth, float* packed) {
  pack<float, kTileColumns>(Matrix<float>{rows, stride}, columns, depth, packed);
}

// x <- (1 + L)⁻¹ x for strictly lower triangular L [n, n], in `count` vectors of columns. `panel`, of n units, is used.
template <int vectors = kTileVectors>
void solve_panel(int64_t count, int64_t n, LeftOperand l, float* x, int64_t stride, float* panel) {
  if constexpr (vectors > 1)
    if (count < vectors) return solve_panel<vectors - 1>(count, n, l, x, stride, panel);
  for (int64_t i = 0; i < n; i += kTileRows) {
    const float* rows = l.data + i * l.row_stride;
    Vec sum[kTileRows][vectors] = {};
    multiply_units<float>(i, rows, l.row_stride, l.unit_stride, panel, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 3
      for (int v = 0; v < vectors; ++v) {
        Vec value = load(x + (i + r) * stride + v * kLanes, AllLanes{}) - sum[r][v];
#pragma GCC unroll 8
        for (int s = 0; s < r; ++s) value -= sum[s][v] * rows[r * l.row_stride + (i + s) * l.unit_stride];
        sum[r][v] = value;
        store(x + (i + r) * stride + v * kLanes, value, AllLanes{});
        store(panel + (i + r) * kTileColumns + v * kLanes, value, AllLanes{});
      }
  }
}

inline void solve(int64_t n, int64_t columns, LeftOperand l, float* x, int64_t stride, float* panel) {
  for (int64_t j = 0; j < columns; j += kTileColumns)
    solve_panel((columns - j + kLanes - 1) / kLanes, n, l, x + j, stride, panel);
}

// Where a token's vector of a head lies.
template <class T>
const T* at(const TokenHeads& tensor, int64_t seq, int64_t token, int64_t head) {
  return static_cast<const T*>(tensor.data) + token / seq * tensor.batch + token % seq * tensor.token +
         head * tensor.head;
}

// A chunk of one sequence: the tokens from `token` on, `count` of them, and zeros up to `rows`, whole vectors.
struct ChunkTokens {
  int64_t token, count, rows;
};

inline ChunkTokens chunk_of(const Sequence& sequence, int64_t chunk) {
  const int64_t token = sequence.begin + chunk * kChunk, count = std::min(kChunk, sequence.end - token);
  return {token, count, round_up(count, kLanes)};
}

inline int64_t chunks_of(const Sequence& sequence) { return (sequence.end - sequence.begin + kChunk - 1) / kChunk; }

// The chunk's arithmetic and its memory: first what value heads with one key head share, then one value head.
template <class T>
class Chunk {
 public:
  Chunk(const DeltaRule& problem, Carver& carver) : problem_(problem) {
    key_columns = round_up(problem.key_dim, kLanes);
    value_columns = round_up(problem.value_dim, kLanes);
    key_stride = row_stride(problem.key_dim);
    value_stride = row_stride(problem.value_dim);
    const int64_t longest = std::max(std::max(key_columns, value_columns), 2 * kChunk);
    packed = carver.take(packed_size(longest, longest, kTileColumns));
    q = carver.take(2 * kChunk * key_stride);
    inverse_norms = carver.take(2 * kChunk);
    products = carver.take(2 * kChunk * kChunkStride);
    decayed_k = carver.take(kChunk * key_stride);
    for (float** square : {&decay, &a, &p}) *square = carver.take(kChunk * kChunkStride);
    for (float** row : {&factor, &beta, &growth}) *row = carver.take(kChunk);
  }

  int64_t state_size() const { return key_columns * value_columns; }

  // q, k, q kᵀ and k kᵀ.
  void load_keys(const ChunkTokens& chunk, int64_t key_head) {
    tokens = chunk;
    k = q + tokens.rows * key_stride;
    load_rows(problem_.q, key_head, problem_.key_dim, q, key_stride);
    load_rows(problem_.k, key_head, problem_.key_dim, k, key_stride);
    if (problem_.l2norm) normalize();
    pack_columns(k, key_stride, tokens.rows, key_columns, packed);
    product(2 * tokens.rows, tokens.rows, {q, key_stride, 1}, packed, panel_size(key_columns, kTileColumns),
            full(key_columns),
            [&](int64_t i, int64_t j, Vec sum) { store(products + i * kChunkStride + j, sum, AllLanes{}); });
  }

  // The head's decays, A and P = scale · D ∘ q kᵀ. The diagonal of A is not 0, but nobody looks at it.
  void load_head(int64_t value_head) {
    load_decays(value_head);
    for (int64_t i = 0; i < tokens.rows; ++i)
      for (int64_t j = 0; j < tokens.rows; j += kLanes) {
        const Vec d = load(decay + i * kChunkStride + j, AllLanes{});
        const Vec qk = load(products + i * kChunkStride + j, AllLanes{});
        const Vec kk = load(products + (tokens.rows + i) * kChunkStride + j, AllLanes{});
        store(p + i * kChunkStride + j, problem_.scale * d * qk, AllLanes{});
        store(a + i * kChunkStride + j, beta[i] * d * kk, AllLanes{});
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

  // errors = v − e^G k S and updates = δ, both [chunk, value_dim]; out = scale · e^G q S, if asked for.
  void update(int64_t value_head, const float* state, float* errors, float* updates, float* out) {
    load_rows(problem_.v, value_head, problem_.value_dim, errors, value_stride);
    pack_rows(state, value_columns, key_columns, value_columns, packed);
    const int64_t first = out == nullptr ? tokens.rows : 0;
    product(2 * tokens.rows - first, value_columns, {q + first * key_stride, key_stride, 1}, packed,
            panel_size(key_columns, kTileColumns), full(key_columns), [&](int64_t row, int64_t column, Vec sum) {
              const int64_t i = row + first - tokens.rows;
              if (i < 0) {
                const float factor = problem_.scale * growth[row];
                return store(out + row * value_stride + column, factor * sum, AllLanes{});
              }
              float* error = errors + i * value_stride + column;
              const Vec difference = load(error, AllLanes{}) - growth[i] * sum;
              store(error, difference, AllLanes{});
              store(updates + i * value_stride + column, beta[i] * difference, AllLanes{});
            });
    solve(tokens.rows, value_columns, {a, kChunkStride, 1}, updates, value_stride, packed);
  }

  // S <- e^G_last S + Σ_j e^(G_last − G_j) k_j δ_jᵀ; leaves δ packed.
  void advance(const float* updates, float* state) {
    const float* tail = decay + (tokens.rows - 1) * kChunkStride;
    for (int64_t i = 0; i < tokens.rows; ++i)
      for (int64_t c = 0; c < key_columns; c += kLanes)
        store(decayed_k + i * key_stride + c, tail[i] * load(k + i * key_stride + c, AllLanes{}), AllLanes{});
    pack_rows(updates, value_stride, tokens.rows, value_columns, packed);
    product(key_columns, value_columns, {decayed_k, 1, key_stride}, packed, panel_size(tokens.rows, kTileColumns),
            full(tokens.rows), [&](int64_t row, int64_t column, Vec sum) {
              float* element = state + row * value_columns + column;
              store(element, growth[tokens.rows - 1] * load(element, AllLanes{}) + sum, AllLanes{});
            });
  }

  int64_t key_columns, value_columns, key_stride, value_stride;
  ChunkTokens tokens;
  float *q, *k;                   // [chunk, key_stride], k right behind q
  float* inverse_norms;           // [2 · chunk], of q and k
  float* products;                // q kᵀ and k kᵀ
  float* decayed_k;               // e^(G_last − G) k
  float *decay, *a, *p;           // D, A, P
  float *factor, *beta, *growth;  // e^g, β, e^G
  float* packed;                  // the right operand of the product at hand

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

  void load_decays(int64_t value_head) {
    for (int64_t i = 0; i < tokens.rows; ++i) {
      const int64_t entry = (tokens.token + i) * problem_.value_heads + value_head;
      factor[i] = i < tokens.count ? problem_.g[entry] : 0.0f;
      beta[i] = i < tokens.count ? problem_.beta[entry] : 0.0f;
    }
    for (int64_t i = 0; i < tokens.rows; i += kLanes) store(factor + i, exp(load(factor + i, AllLanes{})), AllLanes{});
    // What has decayed below any effect is 0: arithmetic with subnormal numbers is slow.
    constexpr float kVanished = 0x1p-100f;
    float total = 1.0f;
    for (int64_t i = 0; i < tokens.rows; ++i) {
      total *= factor[i];
      growth[i] = total = total < kVanished ? 0.0f : total;
      float* row = decay + i * kChunkStride;
      for (int64_t j = 0; j < tokens.rows; j += kLanes) {
        const Vec d = i == 0 ? Vec{} : load(row - kChunkStride + j, AllLanes{}) * factor[i];
        store(row + j, d < kVanished ? Vec{} : d, AllLanes{});
      }
      row[i] = 1.0f;
    }
  }

  const DeltaRule& problem_;
};

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
