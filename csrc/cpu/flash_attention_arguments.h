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

// Reorders work so that neighbouring runs of any length cost about the same: the cheapest, the dearest, the second
// cheapest, ... Threads get such runs.
template <class Work, class Cost>
void spread_evenly(std::vector<Work>& work, Cost&& cost) {
  std::stable_sort(work.begin(), work.end(), [&](const Work& a, const Work& b) { return cost(a) < cost(b); });
  std::vector<Work> spread;
  spread.reserve(work.size());
  for (size_t low = 0, high = work.size(); low < high;) {
    spread.push_back(work[low++]);
    if (low < high) spread.push_back(work[--high]);
  }
  work.swap(spread);
}

}  // namespace mindspeed::cpu
