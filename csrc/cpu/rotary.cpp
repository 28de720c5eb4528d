// torch.ops.mindspeed.rotary and rotary_backward on the CPU.
//
// The floor is memory traffic: queries and keys are read once and written once, in forward and in backward.
#include "rotary.h"

#include "common/cache.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

void check_arguments(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  MINDSPEED_CHECK(
      q.dim() == 4 && k.dim() == 4 && q.size(0) == k.size(0) && q.size(2) == k.size(2) && q.size(3) == k.size(3), op,
      ": q [batch, num_heads, seq, head_dim] and k [batch, num_key_value_heads, seq, head_dim] do not fit "
      "together: q is ",
      shape(q), ", k is ", shape(k));
  MINDSPEED_CHECK(q.scalar_type() == k.scalar_type(), op, ": q and k must have one dtype, but have ", q.scalar_type(),
                  " and ", k.scalar_type());
  MINDSPEED_CHECK(same_shape(cos, sin) && cos.scalar_type() == sin.scalar_type(), op,
                  ": cos and sin must have one shape and one dtype, but are ", shape(cos), " of ", cos.scalar_type(),
                  " and ", shape(sin), " of ", sin.scalar_type());
  MINDSPEED_CHECK(cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == q.size(0)) && cos.size(1) == q.size(2), op,
                  ": cos and sin must be [batch or 1, seq, rotary_dim] for q ", shape(q), ", but are ", shape(cos));
  MINDSPEED_CHECK(cos.size(2) % 2 == 0 && cos.size(2) <= q.size(3) && cos.size(2) <= Rotary::kMaxRotaryDim, op,
                  ": rotary_dim, the last dimension of cos ", shape(cos),
                  ", must be even, at most head_dim, the last of q ", shape(q), ", and at most ",
                  Rotary::kMaxRotaryDim);
}

HeadStrides head_strides(const Tensor& tensor) { return {tensor.stride(0), tensor.stride(1), tensor.stride(2)}; }

// Whether a kernel may store whole vectors past the cache: each row, each half of it and the rest are whole cache
// lines.
bool is_aligned(const Tensor& out, int64_t rotary_dim) {
  constexpr int64_t kCacheLine = 64;
  const int64_t units[] = {out.stride(0), out.stride(1), out.stride(2), rotary_dim / 2};
  bool aligned = reinterpret_cast<uintptr_t>(out.const_data_ptr()) % kCacheLine == 0;
  for (const int64_t unit : units)
    aligned = aligned && unit * static_cast<int64_t>(out.element_size()) % kCacheLine == 0;
  return aligned;
}

RotaryHeads heads(const Tensor& in, const Tensor& out, bool past_cache) {
  return {in.size(1), in.const_data_ptr(), head_strides(in), out.mutable_data_ptr(), head_strides(out), past_cache};
}

RotaryAngles angles(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.const_data_ptr(), tensor.size(0) == 1 ? 0 : tensor.stride(0), tensor.stride(1)};
}

std::tuple<Tensor, Tensor> rotate(const char* op, const Tensor& q_any, const Tensor& k_any, const Tensor& cos_any,
                                  const Tensor& sin_any, bool interleaved, bool transposed, ScalarType out_dtype) {
  check_arguments(op, q_any, k_any, cos_any, sin_any);
  const Tensor q = with_dense_rows(q_any), k = with_dense_rows(k_any);
  const Tensor cos = with_dense_rows(cos_any), sin = with_dense_rows(sin_any);
  Tensor q_out = empty_like(q, out_dtype), k_out = empty_like(k, out_dtype);

  const int64_t batch = q.size(0), seq = q.size(2), head_dim = q.size(3);
  if (head_dim == 0) return {q_out, k_out};
  const int64_t blocks = (seq + Rotary::kPositionsPerBlock - 1) / Rotary::kPositionsPerBlock;
  const bool past_cache = writes_past_cache(bytes(q) + bytes(k) + bytes(q_out) + bytes(k_out));
  run_parallel(rotary_kernel, batch * blocks, Rotary::kPositionsPerBlock * (q.size(1) + k.size(1)) * head_dim,
               Rotary{
                   .seq = seq,
                   .blocks_per_sequence = blocks,
                   .head_dim = head_dim,
                   .rotary_dim = cos.size(2),
                   .interleaved = interleaved,
                   .transposed = transposed,
                   .in_type = dtype_of(q, op, "q"),
                   .angle_type = dtype_of(cos, op, "cos"),
                   .out_type = dtype_of(q_out, op, "the output"),
                   .q = heads(q, q_out, past_cache && is_aligned(q_out, cos.size(2))),
                   .k = heads(k, k_out, past_cache && is_aligned(k_out, cos.size(2))),
                   .cos = angles(cos),
                   .sin = angles(sin),
               });
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                  bool interleaved) {
  const ScalarType out_dtype = q.scalar_type() == cos.scalar_type() ? q.scalar_type() : ScalarType::Float;
  return rotate("rotary", q, k, cos, sin, interleaved, /*transposed=*/false, out_dtype);
}

std::tuple<Tensor, Tensor> rotary_backward(const Tensor& grad_q, const Tensor& grad_k, const Tensor& cos,
                                           const Tensor& sin, bool interleaved, ScalarType q_dtype) {
  const ScalarType expected = q_dtype == cos.scalar_type() ? q_dtype : ScalarType::Float;
  MINDSPEED_CHECK(grad_q.scalar_type() == expected, "rotary_backward: grad_q must have the dtype of the output, ",
                  expected, ", but has ", grad_q.scalar_type());
  return rotate("rotary_backward", grad_q, grad_k, cos, sin, interleaved, /*transposed=*/true, q_dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_backward", TORCH_BOX(&rotary_backward));
}

}  // namespace mindspeed::cpu
