// What test_amx_attention.py calls: attention's kernels with AMX's tiles emulated, on one thread.
#define MINDSPEED_ISA amx
#define MINDSPEED_EMULATE_AMX
#include "csrc/cpu/flash_attention_backward_kernel.cpp"
#include "csrc/cpu/flash_attention_kernel.cpp"

#include <vector>

using namespace mindspeed::cpu;

// As Python's Attention has them. Tensors are contiguous: [tokens, heads, dim], and [heads, tokens] of rows.
struct Attention {
  int64_t num_heads, num_kv_heads, head_dim, value_dim, query_tokens, key_block, window, num_sequences;
  const AttentionSequence* sequences;
  const void *q, *k, *v, *out, *grad_out;           // bfloat16
  const float *sinks, *logsumexp, *grad_logsumexp;  // of sinks, nullptr if there are none
  float *delta, *grad_q, *grad_k, *grad_v, *grad_sinks;
  float scale, softcap;
  bool causal;
};

static AttentionStrides strides(int64_t heads, int64_t dim) { return {0, heads * dim, dim}; }

static AttentionProblem problem_of(const Attention& a, int64_t query_block) {
  const AttentionStrides keys = strides(a.num_kv_heads, a.head_dim), values = strides(a.num_kv_heads, a.value_dim);
  return {DType::kBFloat16, a.num_heads,
          a.num_kv_heads,   a.head_dim,
          a.value_dim,      a.query_tokens,
          a.scale,          a.softcap,
          a.causal,         a.window,
          query_block,      a.key_block,
          a.sequences,      {a.q, strides(a.num_heads, a.head_dim)},
          {a.k, keys},      {a.v, values}};
}

// Calls body(sequence, i) for i = 0, step, ... below the length of each sequence.
template <class Body>
static void for_each_block(const Attention& a, int64_t AttentionSequence::* length, int64_t step, Body&& body) {
  for (int64_t s = 0; s < a.num_sequences; ++s)
    for (int64_t i = 0; i < a.sequences[s].*length; i += step) body(s, i);
}

extern "C" void attend(const Attention& a) {
  constexpr int64_t kQueries = 96;
  std::vector<QueryBlock> blocks;
  for_each_block(a, &AttentionSequence::query_length, 2 * kQueries,
                 [&](int64_t sequence, int64_t query) { blocks.push_back({sequence, query}); });
  const int64_t count = blocks.size();
  amx::flash_attention_forward_kernel({problem_of(a, kQueries), 2 * kQueries, count, blocks.data(), a.sinks,
                                       const_cast<void*>(a.out), const_cast<float*>(a.logsumexp)},
                                      0, count * a.num_kv_heads);
}

extern "C" void differentiate(const Attention& a) {
  constexpr int64_t kQueries = 192;
  const AttentionProblem problem = problem_of(a, kQueries);
  const AttentionStrides queries = strides(a.num_heads, a.head_dim), outputs = strides(a.num_heads, a.value_dim);
  amx::flash_attention_delta_kernel({problem,
                                     a.query_tokens,
                                     a.query_tokens,
                                     {a.out, outputs},
                                     {a.grad_out, outputs},
                                     a.logsumexp,
                                     a.grad_logsumexp,
                                     a.sinks,
                                     a.delta,
                                     a.grad_sinks},
                                    0, 1);
  std::vector<AttentionTile> tiles;
  for_each_block(a, &AttentionSequence::key_length, a.key_block, [&](int64_t sequence, int64_t key) {
    for (int64_t query = 0; query < a.sequences[sequence].query_length; query += 2 * kQueries)
      tiles.push_back({sequence, query, key});
  });
  const int64_t count = tiles.size();
  amx::flash_attention_backward_kernel({problem,
                                        2 * kQueries,
                                        count,
                                        tiles.data(),
                                        {a.grad_out, outputs},
                                        a.logsumexp,
                                        a.delta,
                                        a.grad_q,
                                        a.grad_k,
                                        a.grad_v,
                                        queries,
                                        strides(a.num_kv_heads, a.head_dim),
                                        strides(a.num_kv_heads, a.value_dim)},
                                       0, count * a.num_kv_heads);
}

// How often tiles have been multiplied.
extern "C" int64_t tile_products() { return amx::emulated_products; }
