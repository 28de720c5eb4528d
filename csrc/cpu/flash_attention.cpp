// torch.ops.mindspeed.flash_attention_forward on the CPU.
//
// The floor is arithmetic: two products of each query with each key that it sees.
#include "common/parallel.h"
#include "flash_attention_arguments.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty, torch::stable::full;

// Blocks of queries of all sequences. A block takes about four tiles' rows, of several heads or of several tiles, since
// keys and values are packed for each block anew. All of one head of keys come before those of the next, whose keys
// would take the cache from them.
std::vector<QueryBlock> query_blocks(const AttentionArguments& arguments, int64_t queries_per_item) {
  std::vector<QueryBlock> blocks;
  for (size_t s = 0; s < arguments.sequences.size(); ++s)
    for (int64_t begin = 0; begin < arguments.sequences[s].query_length; begin += queries_per_item)
      blocks.push_back({static_cast<int64_t>(s), begin});
  sort_dearest_first(blocks, [&](const QueryBlock& block) {
    const AttentionSequence& sequence = arguments.sequences[block.sequence];
    const int64_t last = std::min(block.begin + queries_per_item, sequence.query_length) - 1;
    const int64_t keys = visible_keys(arguments.problem, sequence, last).end -
                         visible_keys(arguments.problem, sequence, block.begin).begin;
    return (last + 1 - block.begin) * keys;
  });
  return blocks;
}

std::tuple<Tensor, Tensor> flash_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const std::optional<Tensor>& sinks,
                                                   const std::optional<Tensor>& cu_seqlens_q,
                                                   const std::optional<Tensor>& cu_seqlens_k,
                                                   const std::optional<Tensor>& query_offsets, double scale,
                                                   bool causal, std::optional<int64_t> window,
                                                   std::optional<double> softcap) {
  const AttentionArguments arguments(
      "flash_attention_forward", q, k, v,
      {sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, scale, causal, window, softcap});
  const AttentionProblem& problem = arguments.problem;

  std::vector<int64_t> out_sizes = sizes_of(q), row_sizes = {problem.num_heads, problem.query_tokens};
  out_sizes.back() = problem.value_dim;
  if (q.dim() == 4) row_sizes.insert(row_sizes.begin(), arguments.batch);
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  const bool covered = arguments.covers_queries;
  Tensor out = covered ? empty(out_sizes, q.scalar_type()) : full(out_sizes, 0.0, q.scalar_type());
  Tensor logsumexp = covered ? empty(row_sizes, ScalarType::Float) : full(row_sizes, kNothing, ScalarType::Float);

  const int64_t group = problem.num_kv_heads == 0 ? 1 : problem.num_heads / problem.num_kv_heads;
  const int64_t queries_per_item = problem.query_block * std::max<int64_t>(1, 4 / group);
  const std::vector<QueryBlock> blocks = query_blocks(arguments, queries_per_item);
  const int64_t num_blocks = blocks.size();
  run_dynamic(flash_attention_forward_kernel, num_blocks * problem.num_kv_heads,
              FlashAttentionForward{
                  .problem = problem,
                  .queries_per_item = queries_per_item,
                  .num_blocks = num_blocks,
                  .blocks = blocks.data(),
                  .sinks = arguments.sink_data(),
                  .out = out.mutable_data_ptr(),
                  .logsumexp = logsumexp.mutable_data_ptr<float>(),
              });
  return {out, logsumexp};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("flash_attention_forward", TORCH_BOX(&flash_attention_forward)); }

}  // namespace mindspeed::cpu
