// torch.ops.mindspeed.gated_delta_rule and gated_delta_rule_backward on the CPU.
//
// The floor is arithmetic, float32 whatever the tensors hold: errors would build up in the states. Of the forward pass
// a state is kept every kChunk · kChunksPerCheckpoint tokens; those in between are computed again.
#include "gated_delta_rule.h"

#include <cmath>

#include "common/parallel.h"
#include "common/sequences.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty, torch::stable::full;

constexpr int64_t kTokensPerCheckpoint = DeltaRule::kChunk * DeltaRule::kChunksPerCheckpoint;

// The arguments that both operators take, checked, and as the kernels read them. Owns what `problem` points to.
struct Arguments {
  Tensor q, k, v, g, beta;
  std::optional<Tensor> initial_state;
  std::vector<DeltaRuleSequence> sequences;  // the longest first
  bool covers_all;                           // every token belongs to a sequence
  DeltaRule problem;

  Arguments(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
            const std::optional<Tensor>& initial_state, const std::optional<Tensor>& cu_seqlens, double scale,
            bool qk_l2norm);
  Arguments(const Arguments&) = delete;

  int64_t tokens() const { return q.size(0) * q.size(1); }

  std::vector<int64_t> state_sizes(int64_t count) const {
    return {count, problem.value_heads, problem.key_dim, problem.value_dim};
  }

  // A tensor of results: zeros where no sequence is.
  Tensor result(const Tensor& model, ScalarType dtype) const {
    return covers_all ? empty(sizes_of(model), dtype) : full(sizes_of(model), 0.0, dtype);
  }
};

void check_shapes(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                  const Tensor& beta) {
  bool fit = q.dim() == 4 && v.dim() == 4 && same_shape(q, k) && q.size(0) == v.size(0) && q.size(1) == v.size(1);
  fit = fit && (q.size(2) == 0 ? v.size(2) == 0 : v.size(2) % q.size(2) == 0);
  MINDSPEED_CHECK(
      fit, op,
      ": q and k [batch, seq, key_heads, key_dim] and v [batch, seq, value_heads, value_dim], value_heads a "
      "multiple of key_heads, do not fit together: q is ",
      shape(q), ", k ", shape(k), ", v ", shape(v));
  MINDSPEED_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), op,
                  ": q, k and v must have one dtype, but have ", q.scalar_type(), ", ", k.scalar_type(), " and ",
                  v.scalar_type());
  const auto is_of_heads = [&v](const Tensor& tensor) {
    return tensor.size(0) == v.size(0) && tensor.size(1) == v.size(1) && tensor.size(2) == v.size(2);
  };
  MINDSPEED_CHECK(beta.dim() == 3 && is_of_heads(beta), op,
                  ": beta must be [batch, seq, value_heads], a number for each head of v ", shape(v), ", but is ",
                  shape(beta));
  MINDSPEED_CHECK((g.dim() == 3 || (g.dim() == 4 && g.size(3) == q.size(3))) && is_of_heads(g), op,
                  ": g must be [batch, seq, value_heads] or [batch, seq, value_heads, key_dim], for each head of v ",
                  shape(v), " a number or one for each channel of q ", shape(q), ", but is ", shape(g));
  dtype_of(g, op, "g");
  dtype_of(beta, op, "beta");
}

Tensor float_rows(const Tensor& tensor) {
  return torch::stable::contiguous(torch::stable::to(tensor, ScalarType::Float));
}

TokenHeads token_heads(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

std::vector<DeltaRuleSequence> numbered(const std::vector<Sequence>& runs) {
  std::vector<DeltaRuleSequence> sequences;
  int64_t checkpoint = 0;
  for (const Sequence& run : runs) {
    sequences.push_back({run, static_cast<int64_t>(sequences.size()), checkpoint});
    checkpoint += (run.end - run.begin) / kTokensPerCheckpoint;  // no less than there are, and easily added up
  }
  std::stable_sort(sequences.begin(), sequences.end(), [](const DeltaRuleSequence& a, const DeltaRuleSequence& b) {
    return a.tokens.end - a.tokens.begin > b.tokens.end - b.tokens.begin;
  });
  return sequences;
}

Arguments::Arguments(const char* op, const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const Tensor& g_any,
                     const Tensor& beta_any, const std::optional<Tensor>& initial_any,
                     const std::optional<Tensor>& cu_seqlens, double scale, bool qk_l2norm)
    : q(q_any), k(k_any), v(v_any), g(g_any), beta(beta_any) {
  check_shapes(op, q, k, v, g, beta);
  MINDSPEED_CHECK(std::isfinite(scale), op, ": scale must be finite, but is ", scale);
  q = with_dense_rows(q);
  k = with_dense_rows(k);
  v = with_dense_rows(v);
  g = float_rows(g);
  beta = float_rows(beta);
  sequences = numbered(sequences_of(op, q, cu_seqlens));
  int64_t covered = 0;
  for (const DeltaRuleSequence& sequence : sequences) covered += sequence.tokens.end - sequence.tokens.begin;
  covers_all = covered == tokens();
  problem = {
      .type = dtype_of(q, op, "q"),
      .seq = q.size(1),
      .key_heads = q.size(2),
      .value_heads = v.size(2),
      .key_dim = q.size(3),
      .value_dim = v.size(3),
      .scale = static_cast<float>(scale),
      .l2norm = qk_l2norm,
      .per_channel = g.dim() == 4,
      .sequences = sequences.data(),
      .q = token_heads(q),
      .k = token_heads(k),
      .v = token_heads(v),
      .g = g.const_data_ptr<float>(),
      .beta = beta.const_data_ptr<float>(),
      .initial_state = nullptr,
  };
  if (!initial_any) return;
  const std::vector<int64_t> sizes = state_sizes(sequences.size());
  std::ostringstream expected;
  for (size_t d = 0; d < sizes.size(); ++d) expected << (d ? ", " : "") << sizes[d];
  MINDSPEED_CHECK(sizes_of(*initial_any) == sizes, op,
                  ": initial_state must be [sequences, value_heads, key_dim, value_dim] = [", expected.str(),
                  "], but is ", shape(*initial_any));
  dtype_of(*initial_any, op, "initial_state");
  initial_state = float_rows(*initial_any);
  problem.initial_state = initial_state->const_data_ptr<float>();
}

std::tuple<Tensor, Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                    const Tensor& beta, const std::optional<Tensor>& initial_state,
                                                    const std::optional<Tensor>& cu_seqlens, double scale,
                                                    bool qk_l2norm, bool return_final_state) {
  const Arguments arguments("gated_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm);
  const DeltaRule& problem = arguments.problem;
  const int64_t sequences = arguments.sequences.size();
  Tensor out = arguments.result(v, v.scalar_type());
  Tensor final_state = empty(arguments.state_sizes(return_final_state ? sequences : 0), ScalarType::Float);
  Tensor checkpoints = empty(arguments.state_sizes(arguments.tokens() / kTokensPerCheckpoint), ScalarType::Float);
  run_dynamic(gated_delta_rule_forward_kernel, sequences * problem.key_heads,
              GatedDeltaRuleForward{
                  .problem = problem,
                  .out = out.mutable_data_ptr(),
                  .final_state = return_final_state ? final_state.mutable_data_ptr<float>() : nullptr,
                  .checkpoints = checkpoints.mutable_data_ptr<float>(),
              });
  return {out, final_state, checkpoints};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward(
    const Tensor& grad_out_any, const std::optional<Tensor>& grad_final_state, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& cu_seqlens, const Tensor& checkpoints_any, double scale, bool qk_l2norm) {
  constexpr const char* op = "gated_delta_rule_backward";
  const Arguments arguments(op, q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm);
  const DeltaRule& problem = arguments.problem;
  MINDSPEED_CHECK(same_shape(grad_out_any, v) && grad_out_any.scalar_type() == v.scalar_type(), op,
                  ": grad_out must have the shape and dtype of v, ", shape(v), " of ", v.scalar_type(), ", but has ",
                  shape(grad_out_any), " of ", grad_out_any.scalar_type());
  const int64_t sequences = arguments.sequences.size();
  MINDSPEED_CHECK(!grad_final_state || sizes_of(*grad_final_state) == arguments.state_sizes(sequences), op,
                  ": grad_final_state must be [sequences, value_heads, key_dim, value_dim], but is ",
                  grad_final_state ? shape(*grad_final_state) : "");
  const std::vector<int64_t> checkpoint_sizes = arguments.state_sizes(arguments.tokens() / kTokensPerCheckpoint);
  MINDSPEED_CHECK(sizes_of(checkpoints_any) == checkpoint_sizes && checkpoints_any.scalar_type() == ScalarType::Float,
                  op, ": checkpoints must be what gated_delta_rule returned, but are ", shape(checkpoints_any));

  const Tensor grad_out = with_dense_rows(grad_out_any), checkpoints = torch::stable::contiguous(checkpoints_any);
  const std::optional<Tensor> grad_final =
      grad_final_state ? std::optional(float_rows(*grad_final_state)) : std::nullopt;
  Tensor grad_q = arguments.result(q, q.scalar_type()), grad_k = arguments.result(k, k.scalar_type());
  Tensor grad_v = arguments.result(v, v.scalar_type());
  Tensor grad_g = arguments.result(g, ScalarType::Float), grad_beta = arguments.result(beta, ScalarType::Float);
  Tensor grad_initial = empty(arguments.state_sizes(initial_state ? sequences : 0), ScalarType::Float);
  const Sequence longest = sequences > 0 ? arguments.sequences[0].tokens : Sequence{0, 0};
  run_dynamic(gated_delta_rule_backward_kernel, sequences * problem.key_heads,
              GatedDeltaRuleBackward{
                  .problem = problem,
                  .longest = (longest.end - longest.begin + DeltaRule::kChunk - 1) / DeltaRule::kChunk,
                  .grad_out = token_heads(grad_out),
                  .grad_final_state = grad_final ? grad_final->const_data_ptr<float>() : nullptr,
                  .checkpoints = checkpoints.const_data_ptr<float>(),
                  .grad_q = grad_q.mutable_data_ptr(),
                  .grad_k = grad_k.mutable_data_ptr(),
                  .grad_v = grad_v.mutable_data_ptr(),
                  .grad_g = grad_g.mutable_data_ptr<float>(),
                  .grad_beta = grad_beta.mutable_data_ptr<float>(),
                  .grad_initial_state = initial_state ? grad_initial.mutable_data_ptr<float>() : nullptr,
              });
  const ScalarType state_type = initial_state ? initial_state->scalar_type() : ScalarType::Float;
  return {grad_q,
          grad_k,
          grad_v,
          torch::stable::to(grad_g, g.scalar_type()),
          torch::stable::to(grad_beta, beta.scalar_type()),
          torch::stable::to(grad_initial, state_type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
  m.impl("gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward));
}

}  // namespace mindspeed::cpu
