// The arguments that both flash attention operators take: checked, and as their kernels read them.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "common/tensor.h"
#include "flash_attention.h"

namespace mindspeed::cpu {

struct AttentionOptions {
  std::optional<Tensor> sinks, cu_seqlens_q, cu_seqlens_k, query_offsets;
  double scale;
  bool causal;
  std::optional<int64_t> window;
  std::optional<double> softcap;
};

// Owns what `problem` points to.
struct AttentionArguments {
  Tensor q, k, v;
  int64_t batch;  // 1 if sequences are packed
  std::vector<AttentionSequence> sequences;
  bool covers_queries, covers_keys;  // every token belongs to a sequence
  std::optional<Tensor> sinks;       // float32 [num_heads]
  AttentionProblem problem;

  AttentionArguments(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options);
  AttentionArguments(const AttentionArguments&) = delete;

  const float* sink_data() const { return sinks ? sinks->const_data_ptr<float>() : nullptr; }
};

// [batch, tokens, heads, dim] or, packed, [tokens, heads, dim].
AttentionStrides attention_strides(const Tensor& tensor);
AttentionInput attention_input(const Tensor& tensor);

// Threads that take one piece of work after the other finish at about the same time if the cheapest ones come last.
template <class Work, class Cost>
void sort_dearest_first(std::vector<Work>& work, Cost&& cost) {
  std::stable_sort(work.begin(), work.end(), [&](const Work& a, const Work& b) { return cost(a) > cost(b); });
}

}  // namespace mindspeed::cpu
