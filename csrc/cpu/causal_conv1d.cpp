// torch.ops.mindspeed.causal_conv1d and causal_conv1d_backward on the CPU.
//
// The floor is memory traffic: forward reads x and writes y, backward reads grad_y and x and writes grad_x. What the
// activation is applied to is computed again in backward.
#include "causal_conv1d.h"

#include "chunk_sum.h"
#include "common/cache.h"
#include "common/parallel.h"
#include "common/sequences.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;

// Checked, and as the kernels read them. Owns what `problem` points to.
struct Arguments {
  Rows x;
  std::vector<int64_t> reach;
  Tensor weight, bias;
  CausalConv1d problem;

  Arguments(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool silu,
            const std::optional<Tensor>& cu_seqlens);
  Arguments(const Arguments&) = delete;
};

void check_shapes(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  MINDSPEED_CHECK(x.dim() == 3, op, ": x must be [batch, seq, channels], but is ", shape(x));
  const int64_t channels = x.size(2);
  MINDSPEED_CHECK(weight.dim() == 2 && weight.size(0) == channels && weight.size(1) >= 1, op,
                  ": weight must be [channels, width] with the ", channels, " channels of x ", shape(x), ", but is ",
                  shape(weight));
  MINDSPEED_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == channels), op, ": bias must have shape [", channels,
                  "], the channels of x ", shape(x), ", but has ", bias ? shape(*bias) : "");
  MINDSPEED_CHECK(!bias || bias->scalar_type() == weight.scalar_type(), op, ": bias must have the dtype of weight, ",
                  weight.scalar_type(), ", but has ", bias.value_or(weight).scalar_type());
  dtype_of(weight, op, "weight");
}

// For each token how many tokens of its sequence are before it, at most width - 1; -1 outside of all sequences.
std::vector<int64_t> reach_of(const std::vector<Sequence>& sequences, int64_t tokens, int64_t width) {
  std::vector<int64_t> reach(tokens, -1);
  for (const Sequence& sequence : sequences)
    for (int64_t token = sequence.begin; token < sequence.end; ++token)
      reach[token] = std::min(token - sequence.begin, width - 1);
  return reach;
}

// weight [channels, width], the last column the token's own, as float32 [width, channels] by distance; and the reverse
// for its gradient.
Tensor by_distance(const Tensor& weight) {
  const Tensor wide = torch::stable::contiguous(torch::stable::to(weight, ScalarType::Float));
  const int64_t channels = weight.size(0), width = weight.size(1);
  Tensor result = empty({width, channels}, ScalarType::Float);
  const float* from = wide.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t d = 0; d < width; ++d)
    for (int64_t c = 0; c < channels; ++c) to[d * channels + c] = from[c * width + width - 1 - d];
  return result;
}

Tensor by_channel(const float* by_distance, const Tensor& weight) {
  const int64_t channels = weight.size(0), width = weight.size(1);
  Tensor result = empty({channels, width}, ScalarType::Float);
  float* to = result.mutable_data_ptr<float>();
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t d = 0; d < width; ++d) to[c * width + width - 1 - d] = by_distance[d * channels + c];
  return torch::stable::to(result, weight.scalar_type());
}

Arguments::Arguments(const char* op, const Tensor& x_any, const Tensor& weight_any,
                     const std::optional<Tensor>& bias_any, bool silu, const std::optional<Tensor>& cu_seqlens) {
  check_shapes(op, x_any, weight_any, bias_any);
  x = Rows(x_any);
  const int64_t tokens = count_rows(x_any), channels = x_any.size(2), width = weight_any.size(1);
  reach = reach_of(sequences_of(op, x_any, cu_seqlens), tokens, width);
  weight = by_distance(weight_any);
  bias = bias_any ? torch::stable::contiguous(torch::stable::to(*bias_any, ScalarType::Float))
                  : torch::stable::full({channels}, 0.0, ScalarType::Float);
  problem = {
      .tokens = tokens,
      .channels = channels,
      .width = width,
      .silu = silu,
      .type = dtype_of(x_any, op, "x"),
      .x = x,
      .reach = reach.data(),
      .weight = weight.const_data_ptr<float>(),
      .bias = bias.const_data_ptr<float>(),
  };
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool silu,
                     const std::optional<Tensor>& cu_seqlens) {
  const Arguments arguments("causal_conv1d", x, weight, bias, silu, cu_seqlens);
  Tensor y = empty(sizes_of(x), x.scalar_type());
  constexpr int64_t kTokensPerItem = 64;
  const int64_t tokens = arguments.problem.tokens;
  run_parallel(causal_conv1d_forward_kernel, (tokens + kTokensPerItem - 1) / kTokensPerItem,
               kTokensPerItem * arguments.problem.channels,
               CausalConv1dForward{
                   .problem = arguments.problem,
                   .tokens_per_item = kTokensPerItem,
                   .y = output_rows(y, writes_past_cache(2 * bytes(x))),
               });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias, bool silu,
                                                          const std::optional<Tensor>& cu_seqlens) {
  constexpr const char* op = "causal_conv1d_backward";
  const Arguments arguments(op, x, weight, bias, silu, cu_seqlens);
  const CausalConv1d& problem = arguments.problem;
  MINDSPEED_CHECK(same_shape(grad_y, x) && grad_y.scalar_type() == x.scalar_type(), op,
                  ": grad_y must have the shape and dtype of x, ", shape(x), " of ", x.scalar_type(), ", but has ",
                  shape(grad_y), " of ", grad_y.scalar_type());

  const Chunks chunks(problem.tokens, 64);
  const int64_t shares = (problem.width + 1) * problem.channels;
  Tensor grad_x = empty(sizes_of(x), x.scalar_type());
  Tensor partial = empty({chunks.count, shares}, ScalarType::Float), total = empty({shares}, ScalarType::Float);
  const Rows grad_y_rows(grad_y);
  run_parallel(causal_conv1d_backward_kernel, chunks.count, chunks.rows_per_chunk * problem.channels,
               CausalConv1dBackward{
                   .problem = problem,
                   .tokens_per_chunk = chunks.rows_per_chunk,
                   .grad_y = grad_y_rows,
                   .grad_x = output_rows(grad_x, writes_past_cache(3 * bytes(x))),
                   .partial = partial.mutable_data_ptr<float>(),
               });
  run_parallel(chunk_sum_kernel, shares, chunks.count,
               ChunkSum{
                   .chunks = chunks.count,
                   .columns = shares,
                   .partial = partial.const_data_ptr<float>(),
                   .type = DType::kFloat32,
                   .total = total.mutable_data_ptr(),
               });
  Tensor grad_bias = empty({bias ? problem.channels : 0}, weight.scalar_type());
  if (bias)
    torch::stable::copy_(grad_bias,
                         torch::stable::narrow(total, 0, problem.width * problem.channels, problem.channels));
  return {grad_x, by_channel(total.const_data_ptr<float>(), weight), grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}

}  // namespace mindspeed::cpu
