#include "flash_attention_amx.h"
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
    query_stride_ = round_up(head_units, kLanes);
    grad_out_stride_ = round_up(value_units, kLanes);
    lane_group_ = units_of<T>(queries) * kLanes + kLanes;
    Carver carver(memory);
    const int64_t units = std::max(head_units, value_units);  // scores and their gradients share panels of keys
    keys_ = RightOperand<T>(keys, units, carver);
    values_ = RightOperand<T>(keys, units, carver);
    keys_across_ = RightOperand<T>(problem_.head_dim, units_of<T>(keys), carver);
    queries_across_ = RightOperand<T>(problem_.head_dim, units_of<T>(queries), carver);
    grad_out_across_ = RightOperand<T>(problem_.value_dim, units_of<T>(queries), carver);
    queries_ = carver.take(queries * query_stride_);
    grad_out_ = carver.take(queries * grad_out_stride_);
    weights_across_ = carver.take(keys / kLanes * lane_group_);
    grad_scores_across_ = carver.take(keys / kLanes * lane_group_);
    grad_scores_ = carver.take(queries * units_of<T>(keys));
    shifts_ = carver.take(queries);
    deltas_ = carver.take(queries);
    size_ = carver.used();
  }

  int64_t size() const { return size_; }

  void run(int64_t item) {
    const AttentionTile& tile = args_.tiles[item % args_.num_tiles];
    sequence_ = problem_.sequences[tile.sequence];
    kv_head_ = item / args_.num_tiles;
    keys_of_tile_ = {tile.key_begin, std::min(tile.key_begin + problem_.key_block, sequence_.key_length)};
    pack_keys();

    const int64_t group = problem_.num_heads / problem_.num_kv_heads;
    const int64_t end = std::min(tile.query_begin + args_.queries_per_tile, sequence_.query_length);
    for (int64_t head = kv_head_ * group; head < (kv_head_ + 1) * group; ++head)
      for (int64_t query = tile.query_begin; query < end; query += problem_.query_block)
        differentiate(head, {query, std::min(query + problem_.query_block, end)});
  }

 private:
  int64_t num_keys() const { return keys_of_tile_.end - keys_of_tile_.begin; }

  void pack_keys() {
    const int64_t token = sequence_.key_begin + keys_of_tile_.begin;
    const Matrix<T> k = rows_of<T>(problem_.k, sequence_.batch, token, kv_head_);
    const Matrix<T> v = rows_of<T>(problem_.v, sequence_.batch, token, kv_head_);
    keys_.pack_from(k, num_keys(), problem_.head_dim);
    values_.pack_from(v, num_keys(), problem_.value_dim);
    keys_across_.pack_from(k.transpose(), problem_.head_dim, num_keys());
  }

  void differentiate(int64_t head, IndexRange queries) {
    const StripKeys strips = strip_keys<kStripRows<T>>(problem_, sequence_, queries, keys_of_tile_);
    if (strips.keys[0].begin >= strips.keys[strips.strips - 1].end) return;
    pack_queries(head, queries);
    read_rows(head, queries);
    for (int64_t key = 0; key < num_keys(); key += keys_.width())
      for (int64_t i = 0; i < strips.strips; ++i)
        differentiate_scores(queries, strips, i, {key, std::min(key + keys_.width(), num_keys())});

    accumulate_keys(queries, weights_across_, grad_out_across_, 1.0f,
                    grad_row(args_.grad_v, args_.grad_v_strides, sequence_.key_begin + keys_of_tile_.begin, kv_head_),
                    args_.grad_v_strides.token);
    accumulate_keys(queries, grad_scores_across_, queries_across_, problem_.scale,
                    grad_row(args_.grad_k, args_.grad_k_strides, sequence_.key_begin + keys_of_tile_.begin, kv_head_),
                    args_.grad_k_strides.token);
    accumulate_queries(strips, queries,
                       grad_row(args_.grad_q, args_.grad_q_strides, sequence_.query_begin + queries.begin, head));
  }

  void pack_queries(int64_t head, IndexRange queries) {
    const int64_t token = sequence_.query_begin + queries.begin, count = queries.end - queries.begin;
    const Matrix<T> q = rows_of<T>(problem_.q, sequence_.batch, token, head);
    const Matrix<T> grad_out = rows_of<T>(args_.grad_out, sequence_.batch, token, head);
    copy_rows(q, count, problem_.head_dim, queries_);
    copy_rows(grad_out, count, problem_.value_dim, grad_out_);
    queries_across_.pack_from(q.transpose(), problem_.head_dim, count);
    grad_out_across_.pack_from(grad_out.transpose(), problem_.value_dim, count);
  }

  // What each row's exponents and gradients of scores have in common; of those that see nothing, weights become 0.
  void read_rows(int64_t head, IndexRange queries) {
    const int64_t index =
        (sequence_.batch * problem_.num_heads + head) * problem_.query_tokens + sequence_.query_begin + queries.begin;
    const int64_t count = queries.end - queries.begin;
    const Vec never = broadcast(__builtin_inff());
    for_each_vector(count, [&](int64_t row, auto lanes) {
      const Vec logsumexp = load(args_.logsumexp + index + row, lanes);
      store(shifts_ + row, never, AllLanes{});
      store(shifts_ + row, logsumexp == -never ? never : logsumexp * kLog2E, lanes);
      store(deltas_ + row, load(args_.delta + index + row, lanes), AllLanes{});
    });
    if constexpr (kStripRows<T> > kLanes)  // then a strip may have rows beyond the last vector
      for (int64_t row = round_up(count, kLanes); row < round_up(count, kStripRows<T>); row += kLanes) {
        store(shifts_ + row, never, AllLanes{});
        store(deltas_ + row, Vec{}, AllLanes{});
      }
  }

  // P and dS of a strip of queries and a panel of keys, as the operands of the products that follow. These read of a
  // strip of keys the queries that see any of it, so that groups of keys of which this strip sees none may stay unset.
  void differentiate_scores(IndexRange queries, const StripKeys& strips, int64_t strip, IndexRange panel) {
    const IndexRange seen = clip(strips.keys[strip], panel.begin, panel.end);
    const int64_t begin = round_down(seen.begin, kKeyGroup<T>);
    const int64_t end = seen.begin < seen.end ? round_up(seen.end, kKeyGroup<T>) : begin;
    if (begin == end) return;

    constexpr int64_t stride = RightOperand<T>::kMostColumns;
    alignas(64) float scores[kStripRows<T> * stride], grad_weights[kStripRows<T> * stride];
    multiply_strip(units_of<T>(problem_.head_dim),
                   StripOperand<T>::of_rows(queries_ + strip * kStripRows<T> * query_stride_, query_stride_), keys_,
                   {begin, end}, scores, stride);
    multiply_strip(units_of<T>(problem_.value_dim),
                   StripOperand<T>::of_rows(grad_out_ + strip * kStripRows<T> * grad_out_stride_, grad_out_stride_),
                   values_, {begin, end}, grad_weights, stride);
    finish_strip<kStripRows<T>>(problem_, sequence_, exponents_, {queries.begin + strip * kStripRows<T>, queries.end},
                                keys_of_tile_, {begin, end}, strips.shared[strip], scores, stride);
    for (int r = 0; r < kStripRows<T>; r += 2) {
      const int64_t row = strip * kStripRows<T> + r;
      const Differentiate first(exponents_, shifts_[row], deltas_[row]);
      const Differentiate second(exponents_, shifts_[row + 1], deltas_[row + 1]);
      PairTarget target(*this, row, begin);
      for (int64_t j = r * stride; j < r * stride + end - begin; j += kLanes) {
        const auto [weight, grad_score] = first(scores + j, grad_weights + j);
        const auto [next_weight, next_grad_score] = second(scores + j + stride, grad_weights + j + stride);
        target.store({weight, next_weight}, {grad_score, next_grad_score});
      }
    }
    for (float* operand : {weights_across_, grad_scores_across_})
      StripOperand<T>::finish_units(operand, lane_group_, {begin, end}, strip * kStripRows<T> / kDepthPerUnit<T>);
  }

  // P and dS of one row, from scores and dP.
  class Differentiate {
   public:
    Differentiate(const Exponents& exponents, float shift, float delta)
        : factor_(exponents.factor), softcap_(exponents.softcap), shift_(shift), delta_(delta) {}

    std::pair<Vec, Vec> operator()(const float* scores, const float* grad_weights) const {
      const Vec score = load(scores, AllLanes{});
      const Vec weight = exp2(score * factor_ - shift_);
      Vec grad_score = weight * (load(grad_weights, AllLanes{}) - delta_);
      if (softcap_ != 0.0f) {
        const Vec share = score / softcap_;
        grad_score *= 1.0f - min(broadcast(1.0f), share * share);  // of masked scores, which are -inf, 0
      }
      return {weight, grad_score};
    }

   private:
    const float factor_, softcap_, shift_, delta_;
  };

  // Where P and dS of the rows `row` and `row + 1` go, from a key on.
  class PairTarget {
   public:
    PairTarget(const BackwardTile& tile, int64_t row, int64_t key) : lane_group_(tile.lane_group_) {
      const int64_t across = key / kLanes * lane_group_ + row / kDepthPerUnit<T> * kLanes;
      weights_ = tile.weights_across_ + across;
      grad_scores_ = tile.grad_scores_across_ + across;
      const int64_t stride = units_of<T>(tile.problem_.key_block);
      first_ = reinterpret_cast<Packed<T>*>(tile.grad_scores_ + row * stride) + key;
      second_ = reinterpret_cast<Packed<T>*>(tile.grad_scores_ + (row + 1) * stride) + key;
    }

    // Of kLanes keys; the next ones follow.
    void store(RowPair<T> weights, RowPair<T> grad_scores) {
      weights.store_across(weights_);
      grad_scores.store_across(grad_scores_);
      grad_scores.store_along(first_, second_);
      weights_ += lane_group_;
      grad_scores_ += lane_group_;
      first_ += kLanes;
      second_ += kLanes;
    }

   private:
    const int64_t lane_group_;
    float *weights_, *grad_scores_;
    Packed<T>*first_, *second_;
  };

  // grad [keys, columns] += scale · weightsᵀ · rows, of the queries that see each strip of keys.
  void accumulate_keys(IndexRange queries, const float* weights, const RightOperand<T>& rows, float scale, float* grad,
                       int64_t stride) {
    const auto strip = [&](int64_t i) {
      const int64_t first = i * kStripRows<T>, count = std::min<int64_t>(kStripRows<T>, num_keys() - first);
      const int64_t key = keys_of_tile_.begin + first;
      const IndexRange seen =
          clip(visible_queries(problem_, sequence_, {key, key + count}), queries.begin, queries.end);
      return Strip<T>{StripOperand<T>::of_groups(weights, lane_group_, first),
                      units_around<T>({seen.begin - queries.begin, seen.end - queries.begin}), count};
    };
    combine_product(round_up(num_keys(), kStripRows<T>) / kStripRows<T>, rows, grad, stride, strip,
                    [scale](int64_t, Vec before, Vec sum) { return before + sum * scale; });
  }

  // grad += scale · dS · K.
  void accumulate_queries(const StripKeys& strips, IndexRange queries, float* grad) {
    const auto strip = [&](int64_t i) {
      const int64_t stride = units_of<T>(problem_.key_block), count = queries.end - queries.begin - i * kStripRows<T>;
      return Strip<T>{StripOperand<T>::of_rows(grad_scores_ + i * kStripRows<T> * stride, stride),
                      units_around<T>(strips.keys[i]), std::min<int64_t>(kStripRows<T>, count)};
    };
    combine_product(strips.strips, keys_across_, grad, args_.grad_q_strides.token, strip,
                    [scale = problem_.scale](int64_t, Vec before, Vec sum) { return before + sum * scale; });
  }

  float* grad_row(float* grad, const AttentionStrides& strides, int64_t token, int64_t head) const {
    return grad + sequence_.batch * strides.batch + token * strides.token + head * strides.head;
  }

  const FlashAttentionBackward& args_;
  const AttentionProblem& problem_;
  Exponents exponents_;
  int64_t query_stride_, grad_out_stride_, lane_group_, size_;
  RightOperand<T> keys_, values_, keys_across_;                 // of the tile's keys
  RightOperand<T> queries_across_, grad_out_across_;            // of a block of queries
  float *queries_, *grad_out_, *shifts_, *deltas_;              // of its rows
  float *weights_across_, *grad_scores_across_, *grad_scores_;  // P and dS as operands

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
    [[maybe_unused]] const ProductState<T> state;
    const FloatBuffer workspace(BackwardTile<T>(args, nullptr).size());
    BackwardTile<T> runner(args, workspace.data());
    for (int64_t item = begin; item < end; ++item) runner.run(item);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
