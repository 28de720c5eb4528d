// torch.ops.mindspeed.flash_attention_backward on the CPU.
//
// The floor is arithmetic: five products of each query with each key that it sees. Scores are computed again, once, for
// the gradients of queries and of keys together, which then both are sums over tiles. Waves of tiles that share neither
// queries nor keys make the order of these sums the same on any number of threads.
#include "common/parallel.h"
#include "flash_attention_arguments.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty, torch::stable::full;

constexpr const char* kOp = "flash_attention_backward";

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_like(const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes, ScalarType dtype) {
  bool fits = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t d = 0; fits && d < tensor.dim(); ++d) fits = tensor.size(d) == sizes[d];
  std::ostringstream expected;
  for (size_t d = 0; d < sizes.size(); ++d) expected << (d ? ", " : "") << sizes[d];
  MINDSPEED_CHECK(fits, kOp, ": ", name, " must be [", expected.str(), "] of ", dtype, ", but is ", shape(tensor),
                  " of ", tensor.scalar_type());
}

// The wave of a tile is the diagonal that it lies on, counting tiles.
std::vector<std::vector<AttentionTile>> waves_of_tiles(const AttentionProblem& problem,
                                                       const std::vector<AttentionSequence>& sequences,
                                                       int64_t queries_per_tile) {
  std::vector<std::vector<AttentionTile>> waves;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const AttentionSequence& sequence = sequences[s];
    const int64_t key_tiles = ceil_divide(sequence.key_length, problem.key_block);
    const int64_t query_tiles = ceil_divide(sequence.query_length, queries_per_tile);
    const int64_t diagonals = std::max(key_tiles, query_tiles);
    for (int64_t i = 0; i < key_tiles; ++i) {
      const int64_t key = i * problem.key_block;
      const IndexRange seen =
          visible_queries(problem, sequence, {key, std::min(key + problem.key_block, sequence.key_length)});
      if (seen.begin == seen.end) continue;
      for (int64_t j = seen.begin / queries_per_tile; j < ceil_divide(seen.end, queries_per_tile); ++j) {
        const size_t wave = (j - i + diagonals) % diagonals;
        if (waves.size() <= wave) waves.resize(wave + 1);
        waves[wave].push_back({static_cast<int64_t>(s), j * queries_per_tile, key});
      }
    }
  }
  for (auto& tiles : waves)
    sort_dearest_first(tiles, [&](const AttentionTile& tile) {
      const AttentionSequence& sequence = sequences[tile.sequence];
      return std::min(queries_per_tile, sequence.query_length - tile.query_begin) *
             std::min(problem.key_block, sequence.key_length - tile.key_begin);
    });
  return waves;
}

// Where the gradient of q, k or v adds up: float32 of its shape. In memory, the tokens of a head are neighbours.
Tensor zero_sums(const Tensor& model) {
  std::vector<int64_t> sizes = sizes_of(model);
  const int64_t tokens = model.dim() - 3, heads = model.dim() - 2;
  std::swap(sizes[tokens], sizes[heads]);
  return torch::stable::transpose(full(sizes, 0.0, ScalarType::Float), tokens, heads);
}

// The finished sums, contiguous.
Tensor rounded(const Tensor& sums, ScalarType dtype) {
  Tensor out = empty(sizes_of(sums), dtype);
  return torch::stable::copy_(out, sums);
}

// The sum over chunks, in the dtype of sinks.
Tensor sum_chunks(const Tensor& partial, ScalarType dtype) {
  const int64_t chunks = partial.size(0), heads = partial.size(1);
  Tensor total = full({heads}, 0.0, ScalarType::Float);
  const float* from = partial.const_data_ptr<float>();
  float* to = total.mutable_data_ptr<float>();
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t head = 0; head < heads; ++head) to[head] += from[chunk * heads + head];
  return torch::stable::to(total, dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad_out_any, const std::optional<Tensor>& grad_logsumexp, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out_any, const Tensor& logsumexp_any, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& query_offsets, double scale, bool causal, std::optional<int64_t> window,
    std::optional<double> softcap) {
  const AttentionArguments arguments(
      kOp, q, k, v, {sinks, cu_seqlens_q, cu_seqlens_k, query_offsets, scale, causal, window, softcap});
  AttentionProblem problem = arguments.problem;
  // Larger blocks than forward's, so that packing and sums move less often, even where they outgrow the second-level
  // cache. Of bfloat16, keys are many already.
  (problem.type == DType::kBFloat16 ? problem.query_block : problem.key_block) *= 2;
  std::vector<int64_t> out_sizes = sizes_of(q), row_sizes = {problem.num_heads, problem.query_tokens};
  out_sizes.back() = problem.value_dim;
  if (q.dim() == 4) row_sizes.insert(row_sizes.begin(), arguments.batch);
  check_like("grad_out", grad_out_any, out_sizes, q.scalar_type());
  check_like("out", out_any, out_sizes, q.scalar_type());
  check_like("logsumexp", logsumexp_any, row_sizes, ScalarType::Float);
  if (grad_logsumexp) check_like("grad_logsumexp", *grad_logsumexp, row_sizes, ScalarType::Float);

  const Tensor grad_out = with_dense_rows(grad_out_any), out = with_dense_rows(out_any);
  const Tensor logsumexp = torch::stable::contiguous(logsumexp_any);
  const std::optional<Tensor> grad_rows =
      grad_logsumexp ? std::optional(torch::stable::contiguous(*grad_logsumexp)) : std::nullopt;
  Tensor delta = empty(row_sizes, ScalarType::Float);
  constexpr int64_t kTokensPerChunk = 64;
  const int64_t tokens = arguments.batch * problem.query_tokens, chunks = ceil_divide(tokens, kTokensPerChunk);
  Tensor partial_sinks = empty({sinks ? chunks : 0, problem.num_heads}, ScalarType::Float);
  run_parallel(flash_attention_delta_kernel, chunks, kTokensPerChunk * problem.num_heads * problem.value_dim,
               FlashAttentionDelta{
                   .problem = problem,
                   .tokens = tokens,
                   .tokens_per_chunk = kTokensPerChunk,
                   .out = attention_input(out),
                   .grad_out = attention_input(grad_out),
                   .logsumexp = logsumexp.const_data_ptr<float>(),
                   .grad_logsumexp = grad_rows ? grad_rows->const_data_ptr<float>() : nullptr,
                   .sinks = arguments.sink_data(),
                   .delta = delta.mutable_data_ptr<float>(),
                   .partial_sinks = sinks ? partial_sinks.mutable_data_ptr<float>() : nullptr,
               });

  Tensor grad_q = zero_sums(q), grad_k = zero_sums(k), grad_v = zero_sums(v);
  const int64_t queries_per_tile = 2 * problem.query_block;
  for (const std::vector<AttentionTile>& tiles : waves_of_tiles(problem, arguments.sequences, queries_per_tile)) {
    const int64_t num_tiles = tiles.size();
    run_dynamic(flash_attention_backward_kernel, num_tiles * problem.num_kv_heads,
                FlashAttentionBackward{
                    .problem = problem,
                    .queries_per_tile = queries_per_tile,
                    .num_tiles = num_tiles,
                    .tiles = tiles.data(),
                    .grad_out = attention_input(grad_out),
                    .logsumexp = logsumexp.const_data_ptr<float>(),
                    .delta = delta.const_data_ptr<float>(),
                    .grad_q = grad_q.mutable_data_ptr<float>(),
                    .grad_k = grad_k.mutable_data_ptr<float>(),
                    .grad_v = grad_v.mutable_data_ptr<float>(),
                    .grad_q_strides = attention_strides(grad_q),
                    .grad_k_strides = attention_strides(grad_k),
                    .grad_v_strides = attention_strides(grad_v),
                });
  }
  const ScalarType dtype = q.scalar_type();
  Tensor grad_sinks = sinks ? sum_chunks(partial_sinks, sinks->scalar_type()) : empty({0}, dtype);
  return {rounded(grad_q, dtype), rounded(grad_k, dtype), rounded(grad_v, dtype), grad_sinks};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("flash_attention_backward", TORCH_BOX(&flash_attention_backward));
}

}  // namespace mindspeed::cpu
