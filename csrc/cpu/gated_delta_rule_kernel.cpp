#include "gated_delta_rule_chunk.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// A sequence's value heads that share a key head, chunk by chunk.
template <class T, class Decay>
class ForwardItem {
 public:
  ForwardItem(const GatedDeltaRuleForward& args, float* memory)
      : args_(args), problem_(args.problem), carver_(memory), chunk_(problem_, carver_) {
    group_ = problem_.value_heads / problem_.key_heads;
    states_ = carver_.take(group_ * chunk_.state_size());
    for (float** rows : {&errors_, &updates_, &out_}) *rows = carver_.take(kChunk * chunk_.value_stride);
  }

  int64_t size() const { return carver_.used(); }

  void run(int64_t item) {
    const DeltaRuleSequence& sequence = problem_.sequences[item / problem_.key_heads];
    const int64_t key_head = item % problem_.key_heads;
    const auto for_each_head = [&](auto&& body) {
      for (int64_t i = 0; i < group_; ++i) body(key_head * group_ + i, states_ + i * chunk_.state_size());
    };
    for_each_head([&](int64_t head, float* state) {
      const float* initial = problem_.initial_state;
      load_state(problem_, initial == nullptr ? initial : initial + state_offset(problem_, sequence.index, head),
                 state);
    });
    for (int64_t chunk = 0; chunk < chunks_of(sequence.tokens); ++chunk) {
      chunk_.load_keys(chunk_of(sequence.tokens, chunk), key_head);
      for_each_head([&](int64_t head, float* state) {
        if (chunk > 0 && chunk % DeltaRule::kChunksPerCheckpoint == 0) {
          const int64_t index = sequence.checkpoint + chunk / DeltaRule::kChunksPerCheckpoint - 1;
          store_state(problem_, state, args_.checkpoints + state_offset(problem_, index, head));
        }
        step(head, state);
      });
    }
    if (args_.final_state == nullptr) return;
    for_each_head([&](int64_t head, float* state) {
      store_state(problem_, state, args_.final_state + state_offset(problem_, sequence.index, head));
    });
  }

 private:
  void step(int64_t head, float* state) {
    chunk_.load_head(head);
    chunk_.update(head, state, errors_, updates_, out_);
    chunk_.advance(updates_, state);
    const int64_t rows = chunk_.tokens.rows, stride = chunk_.value_stride;
    product(rows, chunk_.value_columns, {chunk_.p, kChunkStride, 1}, chunk_.packed, panel_size(rows, kTileColumns),
            lower(rows), [&](int64_t row, int64_t column, Vec sum) {
              float* out = out_ + row * stride + column;
              store(out, load(out, AllLanes{}) + sum, AllLanes{});
            });
    for (int64_t i = 0; i < chunk_.tokens.count; ++i) {
      T* out =
          static_cast<T*>(args_.out) + ((chunk_.tokens.token + i) * problem_.value_heads + head) * problem_.value_dim;
      for_each_vector(problem_.value_dim,
                      [&](int64_t c, auto lanes) { store(out + c, load(out_ + i * stride + c, AllLanes{}), lanes); });
    }
  }

  const GatedDeltaRuleForward& args_;
  const DeltaRule& problem_;
  Carver carver_;
  Chunk<T, Decay> chunk_;
  int64_t group_;
  float *states_, *errors_, *updates_, *out_;
};

}  // namespace

void gated_delta_rule_forward_kernel(const GatedDeltaRuleForward& args, int64_t begin, int64_t end) {
  with_kind(args.problem, [&](auto element, auto kind) {
    using Item = ForwardItem<decltype(element), typename decltype(kind)::type>;
    const FloatBuffer memory(Item(args, nullptr).size());
    Item runner(args, memory.data());
    for (int64_t item = begin; item < end; ++item) runner.run(item);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
