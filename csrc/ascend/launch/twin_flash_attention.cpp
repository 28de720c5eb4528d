#include "twin.h"

using namespace mindspeed::ascend;

namespace {

bool strides_fit(const AttentionTiling& tiling) {
  return std::max(tiling.num_heads, tiling.num_kv_heads) * std::max(tiling.head_dim, tiling.value_dim) <=
         kMaxMatrixStride;
}

char* refuse_dimensions(const char* kernel, const AttentionTiling& tiling) {
  return refuse(kernel, "head_dim ", tiling.head_dim, " and value_dim ", tiling.value_dim, " of ", tiling.num_heads,
                " heads are too large");
}

}  // namespace

extern "C" {

// Fills in the rows of a kernel's tiling: of a block, 0 if the dimensions are too large.
int64_t twin_attention_rows(Type type, AttentionKernel kernel, AttentionTiling* tiling) {
  tiling->rows = attention_rows(kernel, *tiling, bytes_of(type));
  return tiling->per_block();
}

// How many bytes of workspace a block of cores needs.
int64_t twin_attention_workspace(Type type, AttentionKernel kernel, const AttentionTiling* tiling) {
  const int64_t size = bytes_of(type);
  return kernel == AttentionKernel::kForward ? tiling->workspace_bytes(size) : tiling->gradient_workspace_bytes(size);
}

// sinks may be null.
char* twin_flash_attention_forward(Run how, Type type, const void* q, const void* k, const void* v,
                                   const QueryBlock* blocks, const float* sinks, void* out, float* logsumexp,
                                   void* memory, int64_t keys, AttentionTiling* tiling) {
  const int64_t size = bytes_of(type);
  tiling->has_sinks = sinks != nullptr;
  if (tiling->rows.per_core == 0 || !strides_fit(*tiling)) return refuse_dimensions("flash_attention_forward", *tiling);
  const int64_t heads = tiling->num_heads, kv_heads = tiling->num_kv_heads;
  return run(how, [&](const Launch& launch) {
    launch_flash_attention(launch, type, input("q", q, tiling->queries * heads * tiling->head_dim * size),
                           input("k", k, keys * kv_heads * tiling->head_dim * size),
                           input("v", v, keys * kv_heads * tiling->value_dim * size),
                           input("blocks", blocks, tiling->blocks * int64_t(sizeof(QueryBlock))),
                           input("sinks", sinks, heads * 4),
                           output("out", out, tiling->queries * heads * tiling->value_dim * size),
                           output("logsumexp", logsumexp, heads * tiling->queries * 4),
                           workspace(memory, how.blocks * tiling->workspace_bytes(size)), *tiling);
  });
}

// With grad_q: its kernel, of query blocks. Without: that of grad_k and grad_v, of key blocks.
char* twin_flash_attention_backward(Run how, Type type, const void* q, const void* k, const void* v,
                                    const void* grad_out, const float* logsumexp, const float* delta,
                                    const int64_t* blocks, void* grad_q, void* grad_k, void* grad_v, void* memory,
                                    int64_t keys, AttentionTiling* tiling) {
  const int64_t size = bytes_of(type);
  if (tiling->rows.per_core == 0 || !strides_fit(*tiling))
    return refuse_dimensions("flash_attention_backward", *tiling);
  const int64_t heads = tiling->num_heads, kv_heads = tiling->num_kv_heads;
  const int64_t q_bytes = tiling->queries * heads * tiling->head_dim * size;
  const int64_t k_bytes = keys * kv_heads * tiling->head_dim * size;
  const int64_t v_bytes = keys * kv_heads * tiling->value_dim * size;
  const AttentionGradientMemory in{
      input("q", q, q_bytes),
      input("k", k, k_bytes),
      input("v", v, v_bytes),
      input("grad_out", grad_out, tiling->queries * heads * tiling->value_dim * size),
      input("logsumexp", logsumexp, heads * tiling->queries * 4),
      input("delta", delta, heads * tiling->queries * 4),
      input("blocks", blocks, tiling->blocks * int64_t(grad_q != nullptr ? sizeof(QueryBlock) : sizeof(KeyBlock))),
      workspace(memory, how.blocks * tiling->gradient_workspace_bytes(size)),
  };
  return run(how, [&](const Launch& launch) {
    if (grad_q != nullptr) {
      launch_flash_attention_query_gradient(launch, type, in, output("grad_q", grad_q, q_bytes), *tiling);
    } else {
      launch_flash_attention_key_gradient(launch, type, in, output("grad_k", grad_k, k_bytes),
                                          output("grad_v", grad_v, v_bytes), *tiling);
    }
  });
}
}
