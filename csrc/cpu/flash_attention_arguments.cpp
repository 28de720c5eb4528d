#include "flash_attention_arguments.h"

#include <cmath>

#include "common/sequences.h"

namespace mindspeed::cpu {
namespace {

void check_shapes(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, bool packed) {
  const int64_t dims = packed ? 3 : 4;
  const char* layout = packed ? "[tokens, heads, dim] with cu_seqlens" : "[batch, seq, heads, dim]";
  MINDSPEED_CHECK(q.dim() == dims && k.dim() == dims && v.dim() == dims, op, ": q, k and v must be ", layout,
                  ", but are ", shape(q), ", ", shape(k), " and ", shape(v));
  const int64_t heads = dims - 2, dim = dims - 1;
  bool fit = q.size(dim) == k.size(dim);
  for (int64_t d = 0; d < dim; ++d) fit = fit && k.size(d) == v.size(d);
  if (!packed) fit = fit && q.size(0) == k.size(0);
  MINDSPEED_CHECK(fit, op,
                  ": q [.., num_heads, head_dim], k [.., num_kv_heads, head_dim] and v [.., num_kv_heads, "
                  "value_dim] do not fit together: q is ",
                  shape(q), ", k ", shape(k), ", v ", shape(v));
  const int64_t num_heads = q.size(heads), num_kv_heads = k.size(heads);
  MINDSPEED_CHECK(num_kv_heads == 0 ? num_heads == 0 : num_heads % num_kv_heads == 0, op, ": the ", num_heads,
                  " heads of q ", shape(q), " must be a multiple of the ", num_kv_heads, " heads of k ", shape(k));
  MINDSPEED_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), op,
                  ": q, k and v must have one dtype, but have ", q.scalar_type(), ", ", k.scalar_type(), " and ",
                  v.scalar_type());
}

std::vector<AttentionSequence> packed_sequences(const char* op, int64_t query_tokens, int64_t key_tokens,
                                                const AttentionOptions& options) {
  const std::vector<int64_t> q = integers(op, "cu_seqlens_q", *options.cu_seqlens_q);
  const std::vector<int64_t> k = integers(op, "cu_seqlens_k", *options.cu_seqlens_k);
  check_boundaries(op, "cu_seqlens_q", q, query_tokens);
  check_boundaries(op, "cu_seqlens_k", k, key_tokens);
  MINDSPEED_CHECK(q.size() == k.size(), op, ": cu_seqlens_q and cu_seqlens_k must have one length, but have ", q.size(),
                  " and ", k.size());
  std::vector<AttentionSequence> sequences;
  for (size_t i = 0; i + 1 < q.size(); ++i) sequences.push_back({0, q[i], q[i + 1] - q[i], k[i], k[i + 1] - k[i], 0});
  return sequences;
}

std::vector<AttentionSequence> dense_sequences(int64_t batch, int64_t query_tokens, int64_t key_tokens) {
  std::vector<AttentionSequence> sequences;
  for (int64_t i = 0; i < batch; ++i) sequences.push_back({i, 0, query_tokens, 0, key_tokens, 0});
  return sequences;
}

void set_offsets(const char* op, std::vector<AttentionSequence>& sequences, const std::optional<Tensor>& offsets) {
  if (!offsets) {
    for (AttentionSequence& sequence : sequences) sequence.offset = sequence.key_length - sequence.query_length;
    return;
  }
  const std::vector<int64_t> values = integers(op, "query_offsets", *offsets);
  MINDSPEED_CHECK(values.size() == sequences.size(), op, ": query_offsets must have a value for each of the ",
                  sequences.size(), " sequences, but has ", values.size());
  constexpr int64_t kFar = AttentionProblem::kNoWindow / 2;  // positions neither overflow nor leave the widest window
  for (size_t i = 0; i < values.size(); ++i) sequences[i].offset = std::clamp(values[i], -kFar, kFar);
}

// Tiles of scores: forward's operands and sums fill most of a second-level cache of 1 MB.
int64_t key_block(DType type, int64_t head_dim, int64_t value_dim) {
  const int64_t keys = type == DType::kBFloat16 ? 384 : 192;  // float16 is widened
  return head_dim + value_dim <= 256 ? keys : keys / 2;
}

}  // namespace

AttentionStrides attention_strides(const Tensor& tensor) {
  if (tensor.dim() == 3) return {0, tensor.stride(0), tensor.stride(1)};
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

AttentionInput attention_input(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.const_data_ptr(), attention_strides(tensor)};
}

AttentionArguments::AttentionArguments(const char* op, const Tensor& q_any, const Tensor& k_any, const Tensor& v_any,
                                       const AttentionOptions& options)
    : q(q_any), k(k_any), v(v_any) {
  const bool packed = options.cu_seqlens_q.has_value();
  MINDSPEED_CHECK(packed == options.cu_seqlens_k.has_value(), op,
                  ": cu_seqlens_q and cu_seqlens_k come together or not at all");
  check_shapes(op, q, k, v, packed);
  MINDSPEED_CHECK(!options.window || *options.window >= 1, op, ": window must be at least 1, but is ",
                  options.window.value_or(0));
  MINDSPEED_CHECK(!options.softcap || *options.softcap > 0, op, ": softcap must be positive, but is ",
                  options.softcap.value_or(0));
  MINDSPEED_CHECK(std::isfinite(options.scale), op, ": scale must be finite, but is ", options.scale);
  q = with_dense_rows(q);
  k = with_dense_rows(k);
  v = with_dense_rows(v);

  const int64_t tokens_dim = packed ? 0 : 1;
  const int64_t query_tokens = q.size(tokens_dim), key_tokens = k.size(tokens_dim);
  batch = packed ? 1 : q.size(0);
  sequences = packed ? packed_sequences(op, query_tokens, key_tokens, options)
                     : dense_sequences(batch, query_tokens, key_tokens);
  set_offsets(op, sequences, options.query_offsets);
  int64_t queries = 0, keys = 0;
  for (const AttentionSequence& sequence : sequences) {
    queries += sequence.query_length;
    keys += sequence.key_length;
  }
  covers_queries = queries == batch * query_tokens;
  covers_keys = keys == batch * key_tokens;

  const int64_t num_heads = q.size(tokens_dim + 1), head_dim = q.size(tokens_dim + 2);
  if (options.sinks) {
    MINDSPEED_CHECK(options.sinks->dim() == 1 && options.sinks->size(0) == num_heads, op, ": sinks must have shape [",
                    num_heads, "], a logit for each head of q ", shape(q), ", but has ", shape(*options.sinks));
    sinks = torch::stable::contiguous(torch::stable::to(*options.sinks, ScalarType::Float));
  }
  const int64_t value_dim = v.size(tokens_dim + 2);
  const DType type = dtype_of(q, op, "q");
  problem = {
      .type = type,
      .num_heads = num_heads,
      .num_kv_heads = k.size(tokens_dim + 1),
      .head_dim = head_dim,
      .value_dim = value_dim,
      .query_tokens = query_tokens,
      .scale = static_cast<float>(options.scale),
      .softcap = static_cast<float>(options.softcap.value_or(0)),
      .causal = options.causal,
      .window = std::min(options.window.value_or(AttentionProblem::kNoWindow), AttentionProblem::kNoWindow),
      .query_block = 96,
      .key_block = key_block(type, head_dim, value_dim),
      .sequences = sequences.data(),
      .q = attention_input(q),
      .k = attention_input(k),
      .v = attention_input(v),
  };
}

}  // namespace mindspeed::cpu
