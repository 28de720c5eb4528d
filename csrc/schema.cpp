// The schema of every operator, once. Implementations register under their backend's key, next to their code; gradients
// and shapes for tracing are in mindspeed_kernels/ops.
#include <torch/csrc/stable/library.h>

// clang-format off
STABLE_TORCH_LIBRARY(mindspeed, m) {
  const auto define = [&m](const char* schema) { m.def(schema, {at::Tag::pt2_compliant_tag}); };

  define("rms_norm(Tensor x, Tensor? weight, float eps, bool zero_centered, bool round_before_weight)"
         " -> (Tensor y, Tensor rstd)");
  define("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool zero_centered,"
         " bool round_before_weight) -> (Tensor y, Tensor sum, Tensor rstd)");
  define("rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd, bool zero_centered,"
         " bool round_before_weight, bool weight_gradient) -> (Tensor grad_x, Tensor grad_weight)");

  define("rms_norm_gated(Tensor x, Tensor gate, Tensor weight, float eps, bool sigmoid) -> (Tensor y, Tensor rstd)");
  define("rms_norm_gated_backward(Tensor grad_y, Tensor x, Tensor gate, Tensor weight, Tensor rstd, bool sigmoid)"
         " -> (Tensor grad_x, Tensor grad_gate, Tensor grad_weight)");

  define("causal_conv1d(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? cu_seqlens) -> Tensor");
  define("causal_conv1d_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? cu_seqlens)"
         " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");

  define("gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state,"
         " Tensor? cu_seqlens, float scale, bool qk_l2norm, bool return_final_state)"
         " -> (Tensor out, Tensor final_state, Tensor checkpoints)");
  define("gated_delta_rule_backward(Tensor grad_out, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v, Tensor g,"
         " Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor checkpoints, float scale, bool qk_l2norm)"
         " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_g, Tensor grad_beta,"
         " Tensor grad_initial_state)");

  define("rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor q_out, Tensor k_out)");
  define("rotary_backward(Tensor grad_q_out, Tensor grad_k_out, Tensor cos, Tensor sin, bool interleaved,"
         " ScalarType q_dtype) -> (Tensor grad_q, Tensor grad_k)");

  define("swiglu(Tensor gate, Tensor? up) -> Tensor");
  define("swiglu_backward(Tensor grad_y, Tensor gate, Tensor? up) -> (Tensor grad_gate, Tensor grad_up)");

  define("adamw_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
         " Tensor(d!)[] copies, int[] steps, float lr, float beta1, float beta2, float eps, float weight_decay,"
         " float grad_scale, int? rounding_seed) -> ()");

  define("symmetric_product(Tensor y, Tensor? x, float alpha, float beta) -> Tensor");

  define("flash_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q,"
         " Tensor? cu_seqlens_k, Tensor? query_offsets, float scale, bool causal, int? window, float? softcap)"
         " -> (Tensor out, Tensor logsumexp)");
  define("flash_attention_backward(Tensor grad_out, Tensor? grad_logsumexp, Tensor q, Tensor k, Tensor v, Tensor out,"
         " Tensor logsumexp, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? query_offsets,"
         " float scale, bool causal, int? window, float? softcap)"
         " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)");

  define("grouped_gemm(Tensor x, Tensor weight, Tensor offsets, bool transposed) -> Tensor");
  define("grouped_gemm_weight_gradient(Tensor grad_y, Tensor x, Tensor offsets, bool transposed) -> Tensor");
  define("moe_permute(Tensor x, Tensor expert_index, int num_experts)"
         " -> (Tensor x_sorted, Tensor offsets, Tensor source)");
  define("moe_unpermute(Tensor y_sorted, Tensor source, Tensor? weights, int top_k) -> Tensor");
  define("moe_unpermute_backward(Tensor grad, Tensor? y_sorted, Tensor source, Tensor? weights, int top_k)"
         " -> (Tensor grad_y_sorted, Tensor grad_weights)");
  define("fused_experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor? gate_up_bias,"
         " Tensor down, Tensor? down_bias, bool transposed, bool interleaved, float alpha, float limit,"
         " float up_offset) -> (Tensor y, Tensor z)");
  define("fused_experts_backward(Tensor grad, Tensor z, Tensor x, Tensor top_k_index, Tensor top_k_weights,"
         " Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, bool transposed, bool interleaved,"
         " float alpha, float limit, float up_offset, bool parameter_gradients) -> (Tensor grad_x,"
         " Tensor grad_top_k_weights, Tensor grad_gate_up, Tensor grad_gate_up_bias, Tensor grad_down,"
         " Tensor grad_down_bias)");

  define("cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor? weight, int ignore_index, float? softcap,"
         " float label_smoothing, float z_loss) -> Tensor");
  define("add_to_bfloat16_sum_(Tensor(a!) high, Tensor(b!) low, Tensor addend, bool last) -> ()");
  define("linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index,"
         " float? softcap, float label_smoothing, float z_loss, int chunk) -> Tensor");
  define("linear_cross_entropy_sum(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index,"
         " float? softcap, float label_smoothing, float z_loss, int chunk, bool[3] gradients)"
         " -> (Tensor loss, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
  define("linear_cross_entropy_backward(Tensor grad_losses, Tensor hidden, Tensor weight, Tensor? bias,"
         " Tensor targets, int ignore_index, float? softcap, float label_smoothing, float z_loss, int chunk,"
         " bool[3] gradients) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
}
// clang-format on
