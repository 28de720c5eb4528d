#include "flash_attention_tile.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// ---- delta and the sinks' gradient.

template <class T>
void differentiate_rows(const FlashAttentionDelta& args, int64_t chunk) {
  const AttentionProblem& problem = args.problem;
  const int64_t heads = problem.num_heads;
  float* sinks = args.partial_sinks == nullptr ? nullptr : args.partial_sinks + chunk * heads;
  for (int64_t head = 0; sinks != nullptr && head < heads; ++head) sinks[head] = 0.0f;

  const int64_t end = std::min((chunk + 1) * args.tokens_per_chunk, args.tokens);
  for (int64_t token = chunk * args.tokens_per_chunk; token < end; ++token) {
    const int64_t batch = token / problem.query_tokens, position = token % problem.query_tokens;
    for (int64_t head = 0; head < heads; ++head) {
      const T* out = rows_of<T>(args.out, batch, position, head).data;
      const T* grad_out = rows_of<T>(args.grad_out, batch, position, head).data;
      const int64_t index = (batch * heads + head) * problem.query_tokens + position;
      const float logsumexp = args.logsumexp[index];
      if (logsumexp == -__builtin_inff()) {  // sees nothing: no gradient passes
        args.delta[index] = 0.0f;
        continue;
      }
      float delta = sum_over(problem.value_dim,
                             [&](int64_t i, auto lanes) { return load(out + i, lanes) * load(grad_out + i, lanes); });
      if (args.grad_logsumexp != nullptr) delta -= args.grad_logsumexp[index];
      args.delta[index] = delta;
      if (sinks != nullptr) sinks[head] -= __builtin_expf(args.sinks[head] - logsumexp) * delta;
    }
  }
}

// ---- The gradients of q, k and v.

// One tile of scores after the other: P from the scores and the logsumexp, dP = dO · Vᵀ, dS = P ∘ (dP − delta), and
// dV += Pᵀ · dO, dK += dSᵀ · Q, dQ += dS · K.
template <class T>
class BackwardTile {
 public:
  BackwardTile(const FlashAttentionBackward& args, float* memory)
      : args_(args), problem_(args.problem), exponents_(args.problem) {
    const int64_t queries = problem_.query_block, keys = problem_.key_block;
    const int64_t head_units = units_of<T>(problem_.head_dim), value_units = units_of<T>(problem_.value_dim);
    head_columns_ = round_up(problem_.head_dim, kLanes);
    value_columns_ = round_up(problem_.value_dim, kLanes);
    lane_group_ = units_of<T>(queries) * kLanes + kLanes;
    Carver carver(memory);
    keys_ = carver.take(packed_size(keys, head_units, kTileColumns));
    values_ = carver.take(packed_size(keys, value_units, kTileColumns));
    keys_across_ = carver.take(packed_size(problem_.head_dim, units_of<T>(keys), kTileColumns));
    queries_ = carver.take(queries * round_up(head_units, kLanes));
    grad_out_ = carver.take(queries * round_up(value_units, kLanes));
    queries_across_ = carver.take(packed_size(problem_.head_dim, units_of<T>(queries), kTileColumns));
    grad_out_across_ = carver.take(packed_size(problem_.value_dim, units_of<T>(queries), kTileColumns));
    scores_ = carver.take(queries * keys);
    grad_weights_ = carver.take(queries * keys);
    weights_across_ = carver.take(keys / kLanes * lane_group_);
    grad_scores_across_ = carver.take(keys / kLanes * lane_group_);
    grad_scores_ = carver.take(queries * units_of<T>(keys));
    grad_k_ = carver.take(keys * head_columns_);
    grad_v_ = carver.take(keys * value_columns_);
    size_ = carver.used();
  }

  int64_t size() const { return size_; }

  void run(int64_t item) {
    const AttentionTile& tile = args_.tiles[item % args_.num_tiles];
    sequence_ = problem_.sequences[tile.sequence];
    kv_head_ = item / args_.num_tiles;
    keys_of_tile_ = {tile.key_begin, std::min(tile.key_begin + problem_.key_block, sequence_.key_length)};
    pack_keys();

    const int64_t group = problem_.num_heads / problem_.num_kv_heads, count = keys_of_tile_.end - keys_of_tile_.begin;
    for (int64_t i = 0; i < round_up(count, kTileRows) * head_columns_; i += kLanes)
      store(grad_k_ + i, Vec{}, AllLanes{});
    for (int64_t i = 0; i < round_up(count, kTileRows) * value_columns_; i += kLanes)
      store(grad_v_ + i, Vec{}, AllLanes{});
    const int64_t end = std::min(tile.query_begin + args_.queries_per_tile, sequence_.query_length);
    for (int64_t head = kv_head_ * group; head < (kv_head_ + 1) * group; ++head)
      for (int64_t query = tile.query_begin; query < end; query += problem_.query_block)
        differentiate(head, {query, std::min(query + problem_.query_block, end)});

    add_keys(grad_k_, head_columns_, problem_.scale, problem_.head_dim, args_.grad_k, args_.grad_k_strides);
    add_keys(grad_v_, value_columns_, 1.0f, problem_.value_dim, args_.grad_v, args_.grad_v_strides);
  }

 private:
  void pack_keys() {
    const int64_t token = sequence_.key_begin + keys_of_tile_.begin, count = keys_of_tile_.end - keys_of_tile_.begin;
    const Matrix<T> k = rows_of<T>(problem_.k, sequence_.batch, token, kv_head_);
    const Matrix<T> v = rows_of<T>(problem_.v, sequence_.batch, token, kv_head_);
    pack<T, kTileColumns>(k, count, problem_.head_dim, keys_);
    pack<T, kTileColumns>(v, count, problem_.value_dim, values_);
    pack<T, kTileColumns>(k.transpose(), problem_.head_dim, count, keys_across_);
  }

  void pack_queries(int64_t head, IndexRange queries) {
    const int64_t token = sequence_.query_begin + queries.begin, count = queries.end - queries.begin;
    const Matrix<T> q = rows_of<T>(problem_.q, sequence_.batch, token, head);
    const Matrix<T> grad_out = rows_of<T>(args_.grad_out, sequence_.batch, token, head);
    copy_rows(q, count, problem_.head_dim, queries_);
    copy_rows(grad_out, count, problem_.value_dim, grad_out_);
    pack<T, kTileColumns>(q.transpose(), problem_.head_dim, count, queries_across_);
    pack<T, kTileColumns>(grad_out.transpose(), problem_.value_dim, count, grad_out_across_);
  }

  void differentiate(int64_t head, IndexRange queries) {
    const StripKeys strips = strip_keys(problem_, sequence_, queries, keys_of_tile_);
    if (strips.keys[0].begin >= strips.keys[strips.strips - 1].end) return;
    pack_queries(head, queries);
    multiply_rows(strips, queries_, problem_.head_dim, keys_, scores_);
    multiply_rows(strips, grad_out_, problem_.value_dim, values_, grad_weights_);
    for (int64_t row = 0; row < queries.end - queries.begin; row += 2)
      differentiate_softmax(head, queries, row, strips.keys[row / kTileRows]);

    accumulate_keys(queries, weights_across_, grad_out_across_, problem_.value_dim, grad_v_, value_columns_);
    accumulate_keys(queries, grad_scores_across_, queries_across_, problem_.head_dim, grad_k_, head_columns_);
    multiply_queries(strips, head, queries);
  }

  // Products of rows of queries with all keys of the tile: scores, or dP.
  void multiply_rows(const StripKeys& strips, const float* rows, int64_t depth, const float* columns, float* products) {
    const int64_t units = units_of<T>(depth), stride = round_up(units, kLanes);
    multiply_strips<T>(
        strips.strips, columns, panel_size(units, kTileColumns), keys_of_tile_.end - keys_of_tile_.begin,
        [&](int64_t s) { return Strip{{rows + s * kTileRows * stride, stride, 1}, {0, units}, strips.keys[s]}; },
        [&](int64_t s, int r) { return products + (s * kTileRows + r) * problem_.key_block; },
        [](float* to, int64_t, int, int64_t column, Vec sum) { store(to + column, sum, AllLanes{}); });
  }

  // P and dS of the rows `row` and `row + 1`, as the operands of the products that follow: of all keys of the tile, 0
  // where nothing is seen, since these sum over queries.
  void differentiate_softmax(int64_t head, IndexRange queries, int64_t row, IndexRange strip) {
    const int64_t count = keys_of_tile_.end - keys_of_tile_.begin;
    const int64_t begin = round_down(strip.begin, kLanes);
    const int64_t end = strip.begin < strip.end ? round_up(strip.end, kLanes) : begin;
    float shift[2], delta[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t query = queries.begin + row + i;
      shift[i] = __builtin_inff();
      delta[i] = 0.0f;
      if (query >= queries.end) continue;
      const int64_t index =
          (sequence_.batch * problem_.num_heads + head) * problem_.query_tokens + sequence_.query_begin + query;
      const float logsumexp = args_.logsumexp[index];
      if (logsumexp != -__builtin_inff()) shift[i] = logsumexp * kLog2E;
      delta[i] = args_.delta[index];
      finish_scores(exponents_, scores_ + (row + i) * problem_.key_block, begin, end,
                    visible_in_block(problem_, sequence_, query, keys_of_tile_));
    }
    const bool paired = queries.begin + row + 1 < queries.end;

    for (int64_t j = 0; j < begin; j += kLanes) store_across(j, row, Vec{}, Vec{}, Vec{}, Vec{});
    for (int64_t j = begin; j < end; j += kLanes) {
      const auto [weight, grad_score] = differentiate_scores(row, j, shift[0], delta[0]);
      Vec next_weight = {}, next_grad_score = {};
      if (paired) {
        const auto next = differentiate_scores(row + 1, j, shift[1], delta[1]);
        next_weight = next.weight;
        next_grad_score = next.grad_score;
      }
      store_across(j, row, weight, next_weight, grad_score, next_grad_score);
    }
    for (int64_t j = end; j < count; j += kLanes) store_across(j, row, Vec{}, Vec{}, Vec{}, Vec{});
  }

  struct Gradient {
    Vec weight, grad_score;
  };

  Gradient differentiate_scores(int64_t row, int64_t j, float shift, float delta) {
    const Vec score = load(scores_ + row * problem_.key_block + j, AllLanes{});
    const Vec weight = exp2(score * exponents_.factor - shift);
    Vec grad_score = weight * (load(grad_weights_ + row * problem_.key_block + j, AllLanes{}) - delta);
    if (exponents_.softcap != 0.0f) {
      const Vec share = score / exponents_.softcap;
      grad_score *= 1.0f - min(broadcast(1.0f), share * share);  // of masked scores, which are -inf, 0
    }
    auto* grad_scores = reinterpret_cast<Packed<T>*>(grad_scores_ + row * units_of<T>(problem_.key_block));
    store(grad_scores + j, grad_score, AllLanes{});
    return {weight, grad_score};
  }

  // Of kLanes keys, the rows `row` and `row + 1`, which the products take as neighbours along their depth.
  void store_across(int64_t j, int64_t row, Vec weight, Vec next_weight, Vec grad_score, Vec next_grad_score) {
    const int64_t at = j / kLanes * lane_group_ + row / kDepthPerUnit<T> * kLanes;
    store_row_pair<T>(weights_across_ + at, weight, next_weight);
    store_row_pair<T>(grad_scores_across_ + at, grad_score, next_grad_score);
  }

  // grad [keys, columns] += weightsᵀ · rows, of the queries that see each strip of keys.
  void accumulate_keys(IndexRange queries, const float* weights, const float* rows, int64_t dim, float* grad,
                       int64_t stride) {
    const int64_t count = keys_of_tile_.end - keys_of_tile_.begin;
    multiply_strips<T>(
        round_up(count, kTileRows) / kTileRows, rows,
        panel_size(units_of<T>(queries.end - queries.begin), kTileColumns), dim,
        [&](int64_t s) {
          const int64_t first = s * kTileRows;
          const IndexRange keys = {keys_of_tile_.begin + first,
                                   keys_of_tile_.begin + std::min(first + kTileRows, count)};
          const IndexRange seen = clip(visible_queries(problem_, sequence_, keys), queries.begin, queries.end);
          return Strip{{weights + first / kLanes * lane_group_ + first % kLanes, 1, kLanes},
                       units_around<T>({seen.begin - queries.begin, seen.end - queries.begin}),
                       {0, seen.begin < seen.end ? dim : 0}};
        },
        [&](int64_t s, int r) { return grad + (s * kTileRows + r) * stride; },
        [](float* to, int64_t, int, int64_t column, Vec sum) {
          store(to + column, load(to + column, AllLanes{}) + sum, AllLanes{});
        });
  }

  // grad_q += scale · dS · K.
  void multiply_queries(const StripKeys& strips, int64_t head, IndexRange queries) {
    const int64_t stride = units_of<T>(problem_.key_block), count = queries.end - queries.begin;
    float* grad = grad_row(args_.grad_q, args_.grad_q_strides, sequence_.query_begin + queries.begin, head);
    multiply_strips<T>(
        strips.strips, keys_across_, panel_size(units_of<T>(keys_of_tile_.end - keys_of_tile_.begin), kTileColumns),
        problem_.head_dim,
        [&](int64_t s) {
          const IndexRange seen = strips.keys[s];
          const int64_t columns = seen.begin < seen.end ? problem_.head_dim : 0;
          return Strip{{grad_scores_ + s * kTileRows * stride, stride, 1}, units_around<T>(seen), {0, columns}};
        },
        [&](int64_t s, int r) { return grad + std::min(s * kTileRows + r, count - 1) * args_.grad_q_strides.token; },
        [&](float* to, int64_t s, int r, int64_t column, Vec sum) {
          if (s * kTileRows + r < count) add(to + column, sum * problem_.scale, problem_.head_dim - column);
        });
  }

  float* grad_row(float* grad, const AttentionStrides& strides, int64_t token, int64_t head) const {
    return grad + sequence_.batch * strides.batch + token * strides.token + head * strides.head;
  }

  // Adds as many lanes as there are elements.
  static void add(float* to, Vec v, int64_t elements) {
    if (elements >= kLanes)
      store(to, load(to, AllLanes{}) + v, AllLanes{});
    else
      store(to, load(to, FirstLanes{elements}) + v, FirstLanes{elements});
  }

  void add_keys(const float* rows, int64_t stride, float scale, int64_t dim, float* grad,
                const AttentionStrides& strides) {
    float* to = grad_row(grad, strides, sequence_.key_begin + keys_of_tile_.begin, kv_head_);
    for (int64_t row = 0; row < keys_of_tile_.end - keys_of_tile_.begin; ++row)
      for (int64_t i = 0; i < dim; i += kLanes)
        add(to + row * strides.token + i, load(rows + row * stride + i, AllLanes{}) * scale, dim - i);
  }

  const FlashAttentionBackward& args_;
  const AttentionProblem& problem_;
  Exponents exponents_;
  int64_t head_columns_, value_columns_, lane_group_, size_;
  float *keys_, *values_, *keys_across_;                             // of the tile's keys
  float *queries_, *grad_out_, *queries_across_, *grad_out_across_;  // of a block of queries
  float *scores_, *grad_weights_;                                    // [query_block, key_block]
  float *weights_across_, *grad_scores_across_, *grad_scores_;       // P and dS as operands
  float *grad_k_, *grad_v_;

  AttentionSequence sequence_;
  int64_t kv_head_;
  IndexRange keys_of_tile_;
};

}  // namespace

void flash_attention_delta_kernel(const FlashAttentionDelta& args, int64_t begin, int64_t end) {
  with_type(args.problem.type, [&](auto element) {
    for (int64_t chunk = begin; chunk < end; ++chunk) differentiate_rows<decltype(element)>(args, chunk);
  });
}

void flash_attention_backward_kernel(const FlashAttentionBackward& args, int64_t begin, int64_t end) {
  with_type(args.problem.type, [&](auto element) {
    using T = decltype(element);
    const FloatBuffer workspace(BackwardTile<T>(args, nullptr).size());
    BackwardTile<T> runner(args, workspace.data());
    for (int64_t item = begin; item < end; ++item) runner.run(item);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
