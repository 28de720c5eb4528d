#include "gated_delta_rule_chunk.h"
#include "gated_delta_rule_decay_gradient.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr int64_t kChunksPerCheckpoint = DeltaRule::kChunksPerCheckpoint;

// Σ over the lanes of a · b, for rows of whole vectors.
inline float dot(const float* a, const float* b, int64_t length) {
  return sum_over(length, [&](int64_t i, auto lanes) { return load(a + i, lanes) * load(b + i, lanes); });
}

// A sequence's value heads that share a key head, chunk by chunk from the last to the first. Between two checkpoints
// the chunks' states are computed again, and kept with their errors and updates.
template <class T, class Decay>
class BackwardItem {
 public:
  BackwardItem(const GatedDeltaRuleBackward& args, float* memory)
      : args_(args), problem_(args.problem), carver_(memory), chunk_(problem_, carver_), decay_(problem_, carver_) {
    group_ = problem_.value_heads / problem_.key_heads;
    const int64_t kept = std::min(args.longest, kChunksPerCheckpoint) * group_;
    const int64_t value_rows = kChunk * chunk_.value_stride;
    states_ = carver_.take(std::max(kept, group_) * chunk_.state_size());
    errors_ = carver_.take(kept * value_rows);
    updates_ = carver_.take(kept * value_rows);
    grad_states_ = carver_.take(group_ * chunk_.state_size());
    grad_keys_ = carver_.take(2 * kChunk * chunk_.key_stride);
    grad_out_ = carver_.take(value_rows);
    grad_updates_ = carver_.take(value_rows);
    grad_reads_ = carver_.take(2 * value_rows);
    pairs_ = carver_.take(kChunk * kPairStride);
    grad_beta_ = carver_.take(kChunk);
  }

  int64_t size() const { return carver_.used(); }

  void run(int64_t item) {
    sequence_ = problem_.sequences[item / problem_.key_heads];
    key_head_ = item % problem_.key_heads;
    for (int64_t i = 0; i < group_; ++i) load_state(problem_, state_of(args_.grad_final_state, i), grad_state(i));
    const int64_t chunks = chunks_of(sequence_.tokens);
    for (int64_t first = round_down(std::max<int64_t>(chunks - 1, 0), kChunksPerCheckpoint); first >= 0;
         first -= kChunksPerCheckpoint) {
      const int64_t last = std::min(first + kChunksPerCheckpoint, chunks);
      recompute(first, last);
      for (int64_t chunk = last - 1; chunk >= first; --chunk) differentiate(chunk, chunk - first);
    }
    if (args_.grad_initial_state == nullptr) return;
    for (int64_t i = 0; i < group_; ++i)
      store_state(problem_, grad_state(i),
                  args_.grad_initial_state + state_offset(problem_, sequence_.index, value_head(i)));
  }

 private:
  int64_t value_head(int64_t i) const { return key_head_ * group_ + i; }

  // Of the i-th head of the group: its entry among states in memory, and what is kept of a chunk between checkpoints.
  const float* state_of(const float* states, int64_t i) const {
    return states == nullptr ? nullptr : states + state_offset(problem_, sequence_.index, value_head(i));
  }
  float* state(int64_t chunk, int64_t i) const { return states_ + (chunk * group_ + i) * chunk_.state_size(); }
  float* errors(int64_t chunk, int64_t i) const { return kept_rows(errors_, chunk, i); }
  float* updates(int64_t chunk, int64_t i) const { return kept_rows(updates_, chunk, i); }
  float* kept_rows(float* rows, int64_t chunk, int64_t i) const {
    return rows + (chunk * group_ + i) * kChunk * chunk_.value_stride;
  }
  float* grad_state(int64_t i) const { return grad_states_ + i * chunk_.state_size(); }

  // States before, errors and updates of the chunks [first, last).
  void recompute(int64_t first, int64_t last) {
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t checkpoint = sequence_.checkpoint + first / kChunksPerCheckpoint - 1;
      const float* from = first == 0 ? state_of(problem_.initial_state, i)
                                     : args_.checkpoints + state_offset(problem_, checkpoint, value_head(i));
      load_state(problem_, from, state(0, i));
    }
    for (int64_t chunk = first; chunk < last; ++chunk) {
      chunk_.load_keys(chunk_of(sequence_.tokens, chunk), key_head_);
      for (int64_t i = 0; i < group_; ++i) {
        const int64_t kept = chunk - first;
        chunk_.load_head(value_head(i));
        chunk_.update(value_head(i), state(kept, i), errors(kept, i), updates(kept, i), nullptr);
        if (chunk + 1 == last) continue;
        std::copy_n(state(kept, i), chunk_.state_size(), state(kept + 1, i));
        chunk_.advance(updates(kept, i), state(kept + 1, i));
      }
    }
  }

  void differentiate(int64_t chunk, int64_t kept) {
    chunk_.load_keys(chunk_of(sequence_.tokens, chunk), key_head_);
    rows_ = chunk_.tokens.rows;
    const KeyGradients grads = {grad_keys_, grad_keys_ + rows_ * chunk_.key_stride};
    std::fill_n(grad_keys_, 2 * rows_ * chunk_.key_stride, 0.0f);
    decay_.begin_keys(chunk_);
    for (int64_t i = 0; i < group_; ++i) {
      chunk_.load_head(value_head(i));
      chunk_.load_rows(args_.grad_out, value_head(i), problem_.value_dim, grad_out_, chunk_.value_stride);
      decay_.begin_head(chunk_);
      differentiate_updates(updates(kept, i), grad_state(i));
      differentiate_squares();
      differentiate_errors(errors(kept, i), value_head(i));
      differentiate_state(state(kept, i), updates(kept, i), grad_state(i), grads);
      decay_.add_pairs(chunk_, chunk_.decay, pairs_, grads);
      store_head(value_head(i));
    }
    decay_.finish_keys(chunk_, grads);
    store_keys();
  }

  // The gradient of what the solution of (1 + A) δ = .. is the solution of:
  //   grad_δ = Pᵀ grad_out + (e^(G_last − G) ∘ k) grad_S, then (1 + A)ᵀ x = grad_δ.
  void differentiate_updates(const float* updates, const float* grad_state) {
    const int64_t columns = chunk_.value_columns, stride = chunk_.value_stride;
    pack_rows(grad_out_, stride, rows_, columns, chunk_.packed);
    product(
        rows_, columns, {chunk_.p, 1, kChunkStride}, chunk_.packed, panel_size(rows_, kTileColumns), upper(rows_),
        [&](int64_t row, int64_t column, Vec sum) { store(grad_updates_ + row * stride + column, sum, AllLanes{}); });
    pack_rows(grad_state, columns, chunk_.key_columns, columns, chunk_.packed);
    product(rows_, columns, {chunk_.writes, chunk_.key_stride, 1}, chunk_.packed,
            panel_size(chunk_.key_columns, kTileColumns), full(chunk_.key_columns),
            [&](int64_t row, int64_t column, Vec sum) { add_to(grad_updates_ + row * stride + column, sum); });
    // From the last row to the first, Aᵀ is lower triangular.
    const int64_t last = rows_ - 1;
    solve(rows_, columns, {chunk_.a + last * kChunkStride + last, -1, -kChunkStride}, grad_updates_ + last * stride,
          -stride, chunk_.packed);
    // grad_P = grad_out δᵀ and grad_A = −x δᵀ.
    pack_columns(updates, stride, rows_, columns, chunk_.packed);
    const auto multiply_updates = [&](const float* left, float* to) {
      product(rows_, rows_, {left, stride, 1}, chunk_.packed, panel_size(columns, kTileColumns), full(columns),
              [&](int64_t row, int64_t column, Vec sum) { store(to + row * kPairStride + column, sum, AllLanes{}); });
    };
    multiply_updates(grad_out_, pairs_);
    multiply_updates(grad_updates_, pairs_ + kChunkStride);
  }

  // From grad_P and −grad_A the gradients of qk, kk and β.
  void differentiate_squares() {
    for (int64_t i = 0; i < rows_; ++i) {
      Vec of_beta = {};
      for (int64_t j = 0; j <= i; j += kLanes) {
        float *of_qk = pairs_ + i * kPairStride + j, *of_kk = of_qk + kChunkStride;
        const Vec grad_p = first_lanes(load(of_qk, AllLanes{}), i + 1 - j);
        const Vec grad_a = first_lanes(-load(of_kk, AllLanes{}), i - j);
        store(of_qk, problem_.scale * grad_p, AllLanes{});
        store(of_kk, chunk_.beta[i] * grad_a, AllLanes{});
        of_beta += grad_a * load(chunk_.kk + i * kChunkStride + j, AllLanes{});
      }
      grad_beta_[i] = sum(of_beta);
    }
  }

  // errors = v − (e^G ∘ k) S, and the right-hand side is β · errors. Writes the gradient of v; what is left are the
  // gradients of the reads (e^G ∘ q) S and (e^G ∘ k) S.
  void differentiate_errors(const float* errors, int64_t head) {
    const int64_t stride = chunk_.value_stride, columns = chunk_.value_columns;
    for (int64_t i = 0; i < rows_; ++i) {
      const float* x = grad_updates_ + i * stride;
      const float beta = chunk_.beta[i], factor = chunk_.decay.read_factor(i);
      grad_beta_[i] += dot(x, errors + i * stride, columns);
      for (int64_t c = 0; c < columns; c += kLanes) {
        store(grad_reads_ + i * stride + c, problem_.scale * factor * load(grad_out_ + i * stride + c, AllLanes{}),
              AllLanes{});
        store(grad_reads_ + (rows_ + i) * stride + c, -beta * factor * load(x + c, AllLanes{}), AllLanes{});
      }
      if (i < chunk_.tokens.count)
        for_each_vector(problem_.value_dim, [&](int64_t c, auto lanes) {
          store(entry<T>(args_.grad_v, problem_.value_heads, i, head, problem_.value_dim) + c,
                beta * load(x + c, AllLanes{}), lanes);
        });
    }
  }

  // Of the reads and of S <- e^G_last ∘ S + Σ_j (e^(G_last − G_j) ∘ k_j) δ_jᵀ.
  void differentiate_state(const float* state, const float* updates, float* grad_state, KeyGradients grads) {
    const int64_t columns = chunk_.value_columns, stride = chunk_.value_stride;
    const int64_t key_columns = chunk_.key_columns, key_stride = chunk_.key_stride;
    const int64_t panel = panel_size(columns, kTileColumns);
    const float* reads = chunk_.decay.reads(chunk_);

    for (int64_t c = 0; c < key_columns; ++c)
      decay_.add_whole(c, chunk_.decay.whole(chunk_, c) * dot(state + c * columns, grad_state + c * columns, columns));
    pack_columns(grad_state, columns, key_columns, columns, chunk_.packed);
    product(rows_, key_columns, {updates, stride, 1}, chunk_.packed, panel, full(columns),
            [&](int64_t row, int64_t column, Vec sum) {
              const int64_t at = row * key_stride + column;
              add_to(grads.k + at, chunk_.decay.tail(chunk_, row, column) * sum);
              decay_.add_write(chunk_, row, column, load(chunk_.writes + at, AllLanes{}) * sum);
            });

    pack_columns(state, columns, key_columns, columns, chunk_.packed);
    product(2 * rows_, key_columns, {grad_reads_, stride, 1}, chunk_.packed, panel, full(columns),
            [&](int64_t row, int64_t column, Vec sum) {
              const int64_t at = row * key_stride + column;
              const int64_t token = row < rows_ ? row : row - rows_;
              add_to(grads.q + at, chunk_.decay.read_decay(chunk_, token, column) * sum);
              decay_.add_read(chunk_, token, column, load(reads + at, AllLanes{}) * sum);
            });
    decay_.finish_state(chunk_);

    pack_rows(grad_reads_, stride, 2 * rows_, columns, chunk_.packed);
    product(key_columns, columns, {reads, 1, key_stride}, chunk_.packed, panel_size(2 * rows_, kTileColumns),
            full(2 * rows_), [&](int64_t row, int64_t column, Vec sum) {
              float* grad = grad_state + row * columns + column;
              store(grad, chunk_.decay.whole(chunk_, row) * load(grad, AllLanes{}) + sum, AllLanes{});
            });
  }

  void store_head(int64_t head) {
    const int64_t channels = problem_.per_channel ? problem_.key_dim : 1;
    decay_.store_head(chunk_, entry<float>(args_.grad_g, problem_.value_heads, 0, head, channels),
                      problem_.value_heads * channels, channels);
    for (int64_t i = 0; i < chunk_.tokens.count; ++i)
      *entry<float>(args_.grad_beta, problem_.value_heads, i, head, 1) = grad_beta_[i];
  }

  void store_keys() {
    for (int64_t i = 0; i < chunk_.tokens.count; ++i) {
      store_key(i, entry<T>(args_.grad_q, problem_.key_heads, i, key_head_, problem_.key_dim));
      store_key(rows_ + i, entry<T>(args_.grad_k, problem_.key_heads, i, key_head_, problem_.key_dim));
    }
  }

  // Of x̂ = x / |x|: (g − x̂ (g · x̂)) / |x|.
  void store_key(int64_t row, T* to) {
    const float *normalized = chunk_.q + row * chunk_.key_stride, *grad = grad_keys_ + row * chunk_.key_stride;
    const float along = problem_.l2norm ? dot(normalized, grad, chunk_.key_columns) : 0.0f;
    const float inverse_norm = problem_.l2norm ? chunk_.inverse_norms[row] : 1.0f;
    for_each_vector(problem_.key_dim, [&](int64_t c, auto lanes) {
      const Vec across = load(grad + c, AllLanes{}) - along * load(normalized + c, AllLanes{});
      store(to + c, inverse_norm * across, lanes);
    });
  }

  // Of the chunk's i-th token and a head in a contiguous tensor [batch · seq, heads, dim].
  template <class E>
  E* entry(void* tensor, int64_t heads, int64_t i, int64_t head, int64_t dim) const {
    return static_cast<E*>(tensor) + ((chunk_.tokens.token + i) * heads + head) * dim;
  }

  const GatedDeltaRuleBackward& args_;
  const DeltaRule& problem_;
  Carver carver_;
  Chunk<T, Decay> chunk_;
  typename GradientOf<Decay>::type decay_;
  DeltaRuleSequence sequence_;
  int64_t key_head_, group_, rows_;
  float *states_, *errors_, *updates_, *grad_states_;
  float* grad_keys_;     // of q and, behind it, k, normalised: [2 · chunk, key_stride]
  float* grad_out_;      // [chunk, value_stride]
  float* grad_updates_;  // the same: of δ, then of β · errors
  float* grad_reads_;    // of (e^G ∘ q) S and, behind it, (e^G ∘ k) S: [2 · chunk, value_stride]
  float* pairs_;         // of P and −A, then of qk and kk: [chunk, 2, chunk]
  float* grad_beta_;
};

}  // namespace

void gated_delta_rule_backward_kernel(const GatedDeltaRuleBackward& args, int64_t begin, int64_t end) {
  with_kind(args.problem, [&](auto element, auto kind) {
    using Item = BackwardItem<decltype(element), typename decltype(kind)::type>;
    const FloatBuffer memory(Item(args, nullptr).size());
    Item runner(args, memory.data());
    for (int64_t item = begin; item < end; ++item) runner.run(item);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
