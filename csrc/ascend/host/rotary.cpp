#include "device.h"

namespace mindspeed::ascend {

namespace {

// Heads are read where they lie, whatever their order in memory, but the elements of one lie together.
Tensor with_dense_heads(const Tensor& heads) { return heads.stride(-1) == 1 ? heads : heads.contiguous(); }

HeadStrides strides_of(const Tensor& heads) { return {heads.stride(0), heads.stride(1), heads.stride(2)}; }

std::tuple<Tensor, Tensor> rotate(const Tensor& q_in, const Tensor& k_in, const Tensor& cos_in, const Tensor& sin_in,
                                  bool interleaved, bool transposed, at::ScalarType out_type) {
  const Tensor q = with_dense_heads(q_in), k = with_dense_heads(k_in);
  // 16-bit angles go with heads of their type that stay of it; otherwise they are float32.
  const bool narrow = cos_in.scalar_type() == q.scalar_type() && out_type == q.scalar_type();
  const auto angle = narrow ? cos_in.scalar_type() : at::kFloat;
  const Tensor cos = cos_in.to(angle).contiguous(), sin = sin_in.to(angle).contiguous();
  const Tensor q_out = at::empty_like(q, q.options().dtype(out_type));
  const Tensor k_out = at::empty_like(k, k.options().dtype(out_type));

  RotaryTiling tiling{};
  tiling.batch = q.size(0), tiling.seq = q.size(2), tiling.head_dim = q.size(3), tiling.rotary_dim = cos.size(2);
  tiling.angle_batch_stride = cos.size(0) == 1 ? 0 : cos.stride(0);
  tiling.interleaved = interleaved, tiling.transposed = transposed;
  tiling.q = {q.size(1), strides_of(q), strides_of(q_out)};
  tiling.k = {k.size(1), strides_of(k), strides_of(k_out)};
  tiling.heads = rotary_heads(tiling, q.element_size(), cos.element_size(), q_out.element_size());
  TORCH_CHECK(tiling.rotary_dim <= kRotaryMaxDim && tiling.heads > 0, "rotary: rotary_dim ", tiling.rotary_dim,
              " and head_dim ", tiling.head_dim, " are too large for the AscendC kernel");
  const int32_t blocks = vector_cores();
  enqueue("mindspeed_rotary", [=](void* stream) {
    launch_rotary({blocks, stream}, type_of(q), type_of(cos), type_of(q_out), input("q", q), input("k", k),
                  input("cos", cos), input("sin", sin), output("q_out", q_out), output("k_out", k_out), tiling);
  });
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                  bool interleaved) {
  return rotate(q, k, cos, sin, interleaved, false, at::promote_types(q.scalar_type(), cos.scalar_type()));
}

std::tuple<Tensor, Tensor> rotary_backward(const Tensor& grad_q, const Tensor& grad_k, const Tensor& cos,
                                           const Tensor& sin, bool interleaved, at::ScalarType q_type) {
  return rotate(grad_q, grad_k, cos, sin, interleaved, true, q_type);
}

}  // namespace

TORCH_LIBRARY_IMPL(mindspeed, PrivateUse1, m) {
  m.impl("rotary", TORCH_FN(rotary));
  m.impl("rotary_backward", TORCH_FN(rotary_backward));
}

}  // namespace mindspeed::ascend
