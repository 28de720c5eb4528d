#include "flash_attention_tile.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// A block of queries of one head: its part of an item.
struct Part {
  int64_t head;
  IndexRange queries;
};

template <class T>
class ForwardItem {
 public:
  ForwardItem(const FlashAttentionForward& args, float* memory)
      : args_(args), problem_(args.problem), exponents_(args.problem) {
    Carver carver(memory);
    const int64_t group = problem_.num_heads / problem_.num_kv_heads;
    parts_ = group * (args.queries_per_item / problem_.query_block);
    rows_ = problem_.query_block;
    value_columns_ = round_up(problem_.value_dim, kLanes);
    query_stride_ = round_up(units_of<T>(problem_.head_dim), kLanes);
    queries_ = carver.take(parts_ * rows_ * query_stride_);
    outputs_ = carver.take(parts_ * rows_ * value_columns_);
    sums_ = carver.take(parts_ * rows_ * kLanes);
    maxima_ = carver.take(parts_ * rows_);
    keys_ = carver.take(packed_size(problem_.key_block, units_of<T>(problem_.head_dim), kTileColumns));
    values_ = carver.take(packed_size(problem_.value_dim, units_of<T>(problem_.key_block), kTileColumns));
    scores_ = carver.take(rows_ * problem_.key_block);
    weights_ = carver.take(rows_ * units_of<T>(problem_.key_block));
    factors_ = carver.take(rows_);
    size_ = carver.used();
  }

  int64_t size() const { return size_; }

  void run(int64_t item) {
    const QueryBlock& block = args_.blocks[item % args_.num_blocks];
    sequence_ = problem_.sequences[block.sequence];
    kv_head_ = item / args_.num_blocks;
    queries_of_item_ = {block.begin, std::min(block.begin + args_.queries_per_item, sequence_.query_length)};

    for (int64_t i = 0; i < parts_; ++i) start(i);
    const IndexRange keys = {visible_keys(problem_, sequence_, queries_of_item_.begin).begin,
                             visible_keys(problem_, sequence_, queries_of_item_.end - 1).end};
    for (int64_t key = keys.begin; key < keys.end; key += problem_.key_block) {
      const IndexRange key_block = {key, std::min(key + problem_.key_block, keys.end)};
      pack_block(key_block);
      for (int64_t i = 0; i < parts_; ++i) attend(i, key_block);
    }
    for (int64_t i = 0; i < parts_; ++i) finish(i);
  }

 private:
  Part part(int64_t i) const {
    const int64_t blocks = args_.queries_per_item / problem_.query_block;
    const int64_t group = problem_.num_heads / problem_.num_kv_heads;
    const int64_t begin = queries_of_item_.begin + i % blocks * problem_.query_block;
    return {kv_head_ * group + i / blocks, clip({begin, begin + problem_.query_block}, 0, queries_of_item_.end)};
  }

  float* output_row(int64_t part, int64_t row) const { return outputs_ + (part * rows_ + row) * value_columns_; }

  // A sink is the first key that each row has seen, with a value of 0.
  void start(int64_t i) {
    const auto [head, queries] = part(i);
    copy_rows(rows_of<T>(problem_.q, sequence_.batch, sequence_.query_begin + queries.begin, head),
              queries.end - queries.begin, problem_.head_dim, queries_ + i * rows_ * query_stride_);
    const float sink = args_.sinks == nullptr ? -__builtin_inff() : args_.sinks[head] * kLog2E;
    Vec sum = {};
    if (sink != -__builtin_inff()) sum[0] = 1.0f;
    for (int64_t row = 0; row < rows_; ++row) {
      maxima_[i * rows_ + row] = sink;
      store(sums_ + (i * rows_ + row) * kLanes, sum, AllLanes{});
      for (int64_t c = 0; c < value_columns_; c += kLanes) store(output_row(i, row) + c, Vec{}, AllLanes{});
    }
  }

  void pack_block(IndexRange keys) {
    const int64_t token = sequence_.key_begin + keys.begin, count = keys.end - keys.begin;
    pack<T, kTileColumns>(rows_of<T>(problem_.k, sequence_.batch, token, kv_head_), count, problem_.head_dim, keys_);
    pack<T, kTileColumns>(rows_of<T>(problem_.v, sequence_.batch, token, kv_head_).transpose(), problem_.value_dim,
                          count, values_);
  }

  void attend(int64_t i, IndexRange keys) {
    const IndexRange queries = part(i).queries;
    const int64_t count = keys.end - keys.begin, stride = problem_.key_block;
    const StripKeys strips = strip_keys(problem_, sequence_, queries, keys);

    const int64_t units = units_of<T>(problem_.head_dim);
    multiply_strips<T>(
        strips.strips, keys_, panel_size(units, kTileColumns), count,
        [&](int64_t s) {
          const float* rows = queries_ + (i * rows_ + s * kTileRows) * query_stride_;
          return Strip{{rows, query_stride_, 1}, {0, units}, strips.keys[s]};
        },
        [&](int64_t s, int r) { return scores_ + (s * kTileRows + r) * stride; },
        [](float* scores, int64_t, int, int64_t column, Vec sum) { store(scores + column, sum, AllLanes{}); });

    for (int64_t query = queries.begin; query < queries.end; ++query) {
      const int64_t row = query - queries.begin;
      const IndexRange strip = strips.keys[row / kTileRows];
      exponentiate(i * rows_ + row, row, strip, visible_in_block(problem_, sequence_, query, keys));
    }

    const int64_t weight_stride = units_of<T>(problem_.key_block);
    multiply_strips<T>(
        strips.strips, values_, panel_size(units_of<T>(count), kTileColumns), problem_.value_dim,
        [&](int64_t s) {
          const IndexRange seen = strips.keys[s];
          const int64_t columns = seen.begin < seen.end ? problem_.value_dim : 0;
          return Strip{
              {weights_ + s * kTileRows * weight_stride, weight_stride, 1}, units_around<T>(seen), {0, columns}};
        },
        [&](int64_t s, int r) { return output_row(i, s * kTileRows + r); },
        [&](float* out, int64_t s, int r, int64_t column, Vec sum) {
          const Vec before = load(out + column, AllLanes{}) * factors_[s * kTileRows + r];
          store(out + column, before + sum, AllLanes{});
        });
  }

  // Turns a row of scores into weights 2^(score - maximum), and counts them in. `state` is the row among all parts'.
  void exponentiate(int64_t state, int64_t row, IndexRange strip, IndexRange visible) {
    factors_[row] = 1.0f;
    if (strip.begin >= strip.end) return;
    const int64_t begin = round_down(strip.begin, kLanes), end = round_up(strip.end, kLanes);
    float* scores = scores_ + row * problem_.key_block;
    auto* weights = reinterpret_cast<Packed<T>*>(weights_ + row * units_of<T>(problem_.key_block));
    finish_scores(exponents_, scores, begin, end, visible);

    Vec largest = load(scores + begin, AllLanes{});
    for (int64_t j = begin + kLanes; j < end; j += kLanes) largest = max(load(scores + j, AllLanes{}), largest);
    const float before = maxima_[state], maximum = std::max(before, largest_lane(largest) * exponents_.factor);
    const float shift = maximum == -__builtin_inff() ? 0.0f : maximum;  // a row that has seen nothing yet

    const float factor = exp2(broadcast(before - shift))[0];
    Vec sum = load(sums_ + state * kLanes, AllLanes{}) * factor;
    for (int64_t j = begin; j < end; j += kLanes) {
      const Vec weight = exp2(load(scores + j, AllLanes{}) * exponents_.factor - shift);
      sum += weight;
      store(weights + j, weight, AllLanes{});
    }
    store(sums_ + state * kLanes, sum, AllLanes{});
    maxima_[state] = maximum;
    factors_[row] = factor;
  }

  void finish(int64_t i) {
    const auto [head, queries] = part(i);
    for (int64_t query = queries.begin; query < queries.end; ++query) {
      const int64_t row = query - queries.begin, state = i * rows_ + row;
      const int64_t token = sequence_.batch * problem_.query_tokens + sequence_.query_begin + query;
      const float total = sum(load(sums_ + state * kLanes, AllLanes{}));
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      T* out = static_cast<T*>(args_.out) + (token * problem_.num_heads + head) * problem_.value_dim;
      for_each_vector(problem_.value_dim, [&](int64_t c, auto lanes) {
        store(out + c, load(output_row(i, row) + c, AllLanes{}) * inverse, lanes);
      });
      const int64_t position = sequence_.query_begin + query;
      args_.logsumexp[(sequence_.batch * problem_.num_heads + head) * problem_.query_tokens + position] =
          total == 0.0f ? -__builtin_inff() : maxima_[state] * kLn2 + __builtin_logf(total);
    }
  }

  const FlashAttentionForward& args_;
  const AttentionProblem& problem_;
  Exponents exponents_;
  int64_t parts_, rows_, value_columns_, query_stride_, size_;
  float *queries_, *outputs_, *sums_, *maxima_, *keys_, *values_, *scores_, *weights_, *factors_;

  AttentionSequence sequence_;
  int64_t kv_head_;
  IndexRange queries_of_item_;
};

}  // namespace

void flash_attention_forward_kernel(const FlashAttentionForward& args, int64_t begin, int64_t end) {
  with_type(args.problem.type, [&](auto element) {
    using T = decltype(element);
    const FloatBuffer workspace(ForwardItem<T>(args, nullptr).size());
    ForwardItem<T> runner(args, workspace.data());
    for (int64_t item = begin; item < end; ++item) runner.run(item);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
