#include "flash_attention_amx.h"
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
    keys_ = RightOperand<T>(problem_.key_block, units_of<T>(problem_.head_dim), carver);
    values_ = RightOperand<T>(problem_.value_dim, units_of<T>(problem_.key_block), carver);
    scores_ = carver.take(rows_ * problem_.key_block);
    weights_ = carver.take(rows_ * units_of<T>(problem_.key_block));
    largest_ = carver.take(rows_ * kLanes);
    shifts_ = carver.take(rows_);
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
    keys_.pack_from(rows_of<T>(problem_.k, sequence_.batch, token, kv_head_), count, problem_.head_dim);
    values_.pack_from(rows_of<T>(problem_.v, sequence_.batch, token, kv_head_).transpose(), problem_.value_dim, count);
  }

  void attend(int64_t i, IndexRange keys) {
    const IndexRange queries = part(i).queries;
    const StripKeys strips = strip_keys<kStripRows<T>>(problem_, sequence_, queries, keys);
    score(i, queries, strips, keys);
    raise_maxima(i);
    for (int64_t row = 0; row < strips.strips * kStripRows<T>; ++row)
      exponentiate(i * rows_ + row, row, strips.keys[row / kStripRows<T>]);

    const int64_t stride = units_of<T>(problem_.key_block);
    const auto strip = [&](int64_t s) {
      return Strip<T>{StripOperand<T>::of_rows(weights_ + s * kStripRows<T> * stride, stride),
                      units_around<T>(strips.keys[s]), kStripRows<T>};
    };
    combine_product(strips.strips, values_, output_row(i, 0), value_columns_, strip,
                    [factors = factors_](int64_t row, Vec before, Vec sum) { return before * factors[row] + sum; });
  }

  // Scores, and of each row the largest in each lane.
  void score(int64_t i, IndexRange queries, const StripKeys& strips, IndexRange keys) {
    for (int64_t row = 0; row < rows_; ++row) store(largest_ + row * kLanes, broadcast(-__builtin_inff()), AllLanes{});
    for (int64_t first = 0; first < keys.end - keys.begin; first += keys_.width())
      for (int64_t s = 0; s < strips.strips; ++s) {
        const IndexRange seen = clip(strips.keys[s], first, first + keys_.width());
        if (seen.begin == seen.end) continue;
        const IndexRange columns = {round_down(seen.begin, kKeyGroup<T>), round_up(seen.end, kKeyGroup<T>)};
        const int64_t row = s * kStripRows<T>, stride = problem_.key_block;
        float* scores = scores_ + row * stride + columns.begin;
        multiply_strip(units_of<T>(problem_.head_dim),
                       StripOperand<T>::of_rows(queries_ + (i * rows_ + row) * query_stride_, query_stride_), keys_,
                       columns, scores, stride);
        finish_strip<kStripRows<T>>(problem_, sequence_, exponents_, {queries.begin + row, queries.end}, keys, columns,
                                    strips.shared[s], scores, stride);
        for (int r = 0; r < kStripRows<T>; ++r) {
          Vec largest = load(largest_ + (row + r) * kLanes, AllLanes{});
          for (int64_t j = 0; j < columns.end - columns.begin; j += kLanes)
            largest = max(load(scores + r * stride + j, AllLanes{}), largest);
          store(largest_ + (row + r) * kLanes, largest, AllLanes{});
        }
      }
  }

  // The new maxima, of kLanes rows at a time, and by which factors they shrink what has been summed so far.
  void raise_maxima(int64_t i) {
    const Vec never = broadcast(-__builtin_inff());
    for (int64_t row = 0; row < rows_; row += kLanes) {
      Vec largest[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) largest[r] = load(largest_ + (row + r) * kLanes, AllLanes{});
      interleave(largest);
      for (int lane = 1; lane < kLanes; ++lane) largest[0] = max(largest[lane], largest[0]);
      float* maxima = maxima_ + i * rows_ + row;
      const Vec before = load(maxima, AllLanes{}), maximum = max(largest[0] * exponents_.factor, before);
      const Vec shift = maximum == never ? Vec{} : maximum;  // of a row that has seen nothing yet
      store(maxima, maximum, AllLanes{});
      store(shifts_ + row, shift, AllLanes{});
      store(factors_ + row, exp2(before - shift), AllLanes{});
    }
  }

  // Turns a row of scores into weights 2^(score - maximum), and counts them in. `state` is the row among all parts'.
  void exponentiate(int64_t state, int64_t row, IndexRange strip) {
    if (strip.begin >= strip.end) return;
    const int64_t begin = round_down(strip.begin, kKeyGroup<T>), end = round_up(strip.end, kKeyGroup<T>);
    const float* scores = scores_ + row * problem_.key_block;
    const float factor = exponents_.factor, shift = shifts_[row];
    auto* weights = reinterpret_cast<Packed<T>*>(weights_ + row * units_of<T>(problem_.key_block));
    Vec sum = load(sums_ + state * kLanes, AllLanes{}) * factors_[row];
    for (int64_t j = begin; j < end; j += kLanes) {
      const Vec weight = exp2(load(scores + j, AllLanes{}) * factor - shift);
      sum += weight;
      store(weights + j, weight, AllLanes{});
    }
    store(sums_ + state * kLanes, sum, AllLanes{});
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
  float *queries_, *outputs_, *sums_, *maxima_, *scores_, *weights_, *largest_, *shifts_, *factors_;
  RightOperand<T> keys_, values_;

  AttentionSequence sequence_;
  int64_t kv_head_;
  IndexRange queries_of_item_;
};

}  // namespace

void flash_attention_forward_kernel(const FlashAttentionForward& args, int64_t begin, int64_t end) {
  with_type(args.problem.type, [&](auto element) {
    using T = decltype(element);
    [[maybe_unused]] const ProductState<T> state;
    const FloatBuffer workspace(ForwardItem<T>(args, nullptr).size());
    ForwardItem<T> runner(args, workspace.data());
    for (int64_t item = begin; item < end; ++item) runner.run(item);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
