// torch.ops.mindspeed.fused_experts and fused_experts_backward on the CPU.
//
// The floor is the multiplier's. Tokens are gathered while they are packed, never copied by expert. A row's weight in
// its token's sum is applied to the activation h, which saves keeping the experts' outputs for its gradient: y = Σ w
// (a(z) · down) = Σ (w a(z)) · down, and with g = dL/dy of the token, dL/dw = (g · downᵀ) · a(z). Of the forward pass
// only z, the input of the activation, is kept.
#include "fused_experts.h"

#include <algorithm>

#include "common/groups.h"
#include "common/parallel.h"
#include "common/routing.h"
#include "common/tensor.h"
#include "grouped_gemm.h"
#include "moe_permute.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;

// Float32 without gaps, for the kernels.
class Floats {
 public:
  explicit Floats(const std::optional<Tensor>& tensor) {
    if (tensor) tensor_ = torch::stable::contiguous(torch::stable::to(*tensor, ScalarType::Float));
  }

  const float* data() const { return tensor_ ? tensor_->const_data_ptr<float>() : nullptr; }

 private:
  std::optional<Tensor> tensor_;
};

// The arguments that forward and backward have in common, checked.
struct Experts {
  const Tensor &x, &gate_up, &down;
  int64_t tokens, hidden, count, top_k;
  bool transposed;
  DType type;
  GatedActivation activation;
  Rows x_rows;
  Floats gate_up_bias, down_bias;
  Routing routing;
  Groups groups;
  std::vector<int64_t> token;  // of each row
  std::vector<float> weight;   // of each row

  Experts(const char* op, const Tensor& x, const Tensor& index, const Tensor& weights, const Tensor& gate_up,
          const std::optional<Tensor>& gate_up_bias, const Tensor& down, const std::optional<Tensor>& down_bias,
          bool transposed, bool interleaved, double alpha, double limit, double up_offset);

  int64_t rows() const { return groups.rows(); }
  std::vector<int64_t> shape_of(int64_t columns) const { return {rows(), columns}; }
};

void check_shapes(const char* op, const Tensor& x, const Tensor& index, const Tensor& weights, const Tensor& gate_up,
                  const std::optional<Tensor>& gate_up_bias, const Tensor& down, const std::optional<Tensor>& down_bias,
                  bool transposed) {
  MINDSPEED_CHECK(x.dim() == 2 && index.dim() == 2 && same_shape(index, weights) && index.size(0) == x.size(0), op,
                  ": x must be [tokens, hidden], top_k_index and top_k_weights [tokens, top_k], but have shapes ",
                  shape(x), ", ", shape(index), " and ", shape(weights));
  MINDSPEED_CHECK(1 <= index.size(1) && index.size(1) <= kMaxTopK, op, ": top_k must be in [1, ", kMaxTopK,
                  "], but is ", index.size(1));
  const int64_t out = transposed ? 2 : 1, in = transposed ? 1 : 2;
  MINDSPEED_CHECK(gate_up.dim() == 3 && down.dim() == 3 && gate_up.size(0) == down.size(0) &&
                      gate_up.size(in) == x.size(1) && down.size(out) == x.size(1) &&
                      gate_up.size(out) == 2 * down.size(in),
                  op, ": with x ", shape(x), ", gate_up must be [experts, ",
                  transposed ? "hidden, 2 · intermediate] and down [experts, intermediate, hidden]"
                             : "2 · intermediate, hidden] and down [experts, hidden, intermediate]",
                  ", but have shapes ", shape(gate_up), " and ", shape(down));
  const auto check_bias = [&](const char* name, const std::optional<Tensor>& bias, int64_t size) {
    if (!bias) return;
    MINDSPEED_CHECK(bias->dim() == 2 && bias->size(0) == gate_up.size(0) && bias->size(1) == size, op, ": ", name,
                    " must be [", gate_up.size(0), ", ", size, "], but has shape ", shape(*bias));
    dtype_of(*bias, op, name);
  };
  check_bias("gate_up_bias", gate_up_bias, gate_up.size(out));
  check_bias("down_bias", down_bias, x.size(1));
  for (const Tensor* tensor : {&gate_up, &down})
    MINDSPEED_CHECK(tensor->scalar_type() == x.scalar_type(), op, ": gate_up and down must have the dtype of x, ",
                    x.scalar_type(), ", but have ", gate_up.scalar_type(), " and ", down.scalar_type());
  dtype_of(weights, op, "top_k_weights");
}

Experts::Experts(const char* op, const Tensor& x, const Tensor& index, const Tensor& weights, const Tensor& gate_up,
                 const std::optional<Tensor>& gate_up_bias, const Tensor& down, const std::optional<Tensor>& down_bias,
                 bool transposed, bool interleaved, double alpha, double limit, double up_offset)
    : x(x),
      gate_up(gate_up),
      down(down),
      tokens(x.size(0)),
      hidden(x.size(1)),
      count(gate_up.size(0)),
      top_k(index.size(1)),
      transposed(transposed),
      type(dtype_of(x, op, "x")),
      activation{down.size(transposed ? 1 : 2), interleaved, static_cast<float>(alpha), static_cast<float>(limit),
                 static_cast<float>(up_offset)},
      x_rows(x),
      gate_up_bias(gate_up_bias),
      down_bias(down_bias),
      routing(Routing::sort(op, index, count)),
      groups(routing.bounds),
      token(groups.rows()),
      weight(groups.rows()) {
  const Floats all(weights);
  for (int64_t r = 0; r < rows(); ++r) {
    token[r] = routing.source[r] / top_k;
    weight[r] = all.data()[routing.source[r]];
  }
}

// The sum of each token's rows.
Tensor combine(const Experts& experts, const Tensor& rows) {
  Tensor out = empty({experts.tokens, experts.hidden}, rows.scalar_type());
  run_parallel(moe_unpermute_kernel, experts.tokens, experts.hidden * experts.top_k,
               MoeUnpermute{
                   .type = experts.type,
                   .hidden = experts.hidden,
                   .top_k = experts.top_k,
                   .position = experts.routing.position.data(),
                   .y = Rows(rows),
                   .weights = nullptr,
                   .out = output_rows(out, false),
               });
  return out;
}

// Rows of `depth` columns times each expert's matrix, and the sum of each token's rows.
Tensor multiply_and_combine(const Experts& experts, const Tensor& rows, const StackedWeights& weights,
                            const float* bias) {
  Tensor y = empty(experts.shape_of(experts.hidden), rows.scalar_type());
  const std::vector<GroupBlock> blocks = experts.groups.blocks_of_rows(experts.hidden);
  run_dynamic(grouped_gemm_kernel, blocks.size(),
              GroupedGemm{
                  .type = experts.type,
                  .depth = rows.size(1),
                  .columns = experts.hidden,
                  .blocks = blocks.data(),
                  .x = Rows(rows),
                  .weight = weights,
                  .bias = bias,
                  .bias_scale = experts.weight.data(),
                  .y = output_rows(y, false),
              });
  return combine(experts, y);
}

std::tuple<Tensor, Tensor> fused_experts(const Tensor& x, const Tensor& index, const Tensor& weights,
                                         const Tensor& gate_up, const std::optional<Tensor>& gate_up_bias,
                                         const Tensor& down, const std::optional<Tensor>& down_bias, bool transposed,
                                         bool interleaved, double alpha, double limit, double up_offset) {
  constexpr const char* op = "fused_experts";
  check_shapes(op, x, index, weights, gate_up, gate_up_bias, down, down_bias, transposed);
  const Experts experts(op, x, index, weights, gate_up, gate_up_bias, down, down_bias, transposed, interleaved, alpha,
                        limit, up_offset);
  const int64_t size = experts.activation.size;
  // As many rows as there could be, since the shape must not depend on the routing.
  const int64_t all_rows = experts.tokens * experts.top_k;
  Tensor all_z = empty({all_rows, 2 * size}, x.scalar_type());
  Tensor rest = torch::stable::narrow(all_z, 0, experts.rows(), all_rows - experts.rows());
  torch::stable::zero_(rest);
  Tensor h = empty(experts.shape_of(size), x.scalar_type());
  const StackedWeights gate_up_matrices(gate_up, transposed), down_matrices(down, transposed);
  const std::vector<GroupBlock> blocks = experts.groups.blocks_of_rows(size);
  run_dynamic(fused_experts_forward_kernel, blocks.size(),
              ExpertsForward{
                  .type = experts.type,
                  .hidden = experts.hidden,
                  .activation = experts.activation,
                  .blocks = blocks.data(),
                  .x = experts.x_rows,
                  .token = experts.token.data(),
                  .gate_up = gate_up_matrices,
                  .bias = experts.gate_up_bias.data(),
                  .weight = experts.weight.data(),
                  .z = output_rows(all_z, false),
                  .h = output_rows(h, false),
              });
  return {multiply_and_combine(experts, h, down_matrices, experts.down_bias.data()), all_z};
}

// The gradient of stacked weights from what was multiplied by them, rows in order or as `index` names them.
struct Factor {
  const Tensor& rows;
  const int64_t* index;
};

Tensor weight_gradient(const Experts& experts, Factor grad, Factor input) {
  const Factor &left = experts.transposed ? input : grad, &right = experts.transposed ? grad : input;
  const int64_t rows = left.rows.size(1), columns = right.rows.size(1);
  Tensor gradient = empty({experts.count, rows, columns}, experts.x.scalar_type());
  if (experts.rows() == 0) return torch::stable::zero_(gradient);
  const Rows left_rows(left.rows), right_rows(right.rows);
  const std::vector<GroupBlock> blocks = experts.groups.blocks_of_matrices(rows, columns);
  run_dynamic(grouped_outer_product_kernel, blocks.size(),
              GroupedOuterProduct{
                  .type = experts.type,
                  .bounds = experts.groups.bounds(),
                  .blocks = blocks.data(),
                  .left = left_rows,
                  .right = right_rows,
                  .left_index = left.index,
                  .right_index = right.index,
                  .z = gradient.mutable_data_ptr(),
                  .rows = rows,
                  .columns = columns,
              });
  return gradient;
}

// The gradient of a bias: the sum of each expert's rows.
Tensor bias_gradient(const Experts& experts, const Tensor& bias, const Factor& grad, const float* weight) {
  Tensor sums = empty(sizes_of(bias), ScalarType::Float);
  const Rows rows(grad.rows);
  run_parallel(fused_experts_bias_gradient_kernel, experts.count,
               experts.rows() / std::max<int64_t>(1, experts.count) * sums.size(1),
               ExpertsBiasGradient{
                   .type = experts.type,
                   .size = sums.size(1),
                   .bounds = experts.groups.bounds(),
                   .x = rows,
                   .index = grad.index,
                   .weight = weight,
                   .sums = sums.mutable_data_ptr<float>(),
               });
  return torch::stable::to(sums, bias.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fused_experts_backward(
    const Tensor& grad, const Tensor& all_z, const Tensor& x, const Tensor& index, const Tensor& weights,
    const Tensor& gate_up, const std::optional<Tensor>& gate_up_bias, const Tensor& down,
    const std::optional<Tensor>& down_bias, bool transposed, bool interleaved, double alpha, double limit,
    double up_offset, bool parameter_gradients) {
  constexpr const char* op = "fused_experts_backward";
  check_shapes(op, x, index, weights, gate_up, gate_up_bias, down, down_bias, transposed);
  MINDSPEED_CHECK(same_shape(grad, x) && grad.scalar_type() == x.scalar_type(), op, ": grad must be like x, ", shape(x),
                  " of ", x.scalar_type(), ", but is ", shape(grad), " of ", grad.scalar_type());
  const Experts experts(op, x, index, weights, gate_up, gate_up_bias, down, down_bias, transposed, interleaved, alpha,
                        limit, up_offset);
  const int64_t size = experts.activation.size;
  MINDSPEED_CHECK(all_z.dim() == 2 && all_z.size(0) == index.numel() && all_z.size(1) == 2 * size &&
                      all_z.scalar_type() == x.scalar_type(),
                  op, ": z must be [", index.numel(), ", ", 2 * size, "] of ", x.scalar_type(), ", but is ",
                  shape(all_z), " of ", all_z.scalar_type());
  Tensor grad_z = empty(experts.shape_of(2 * size), x.scalar_type());
  Tensor h = empty(experts.shape_of(size), x.scalar_type());
  std::vector<float> grad_weight(experts.rows());
  const Rows grad_rows(grad), z_rows(all_z);
  const StackedWeights gate_up_matrices(gate_up, !transposed), down_matrices(down, !transposed);
  const std::vector<GroupBlock> blocks = experts.groups.blocks_of_rows();
  run_dynamic(fused_experts_backward_kernel, blocks.size(),
              ExpertsBackward{
                  .type = experts.type,
                  .hidden = experts.hidden,
                  .activation = experts.activation,
                  .blocks = blocks.data(),
                  .grad = grad_rows,
                  .token = experts.token.data(),
                  .down = down_matrices,
                  .down_bias = experts.down_bias.data(),
                  .weight = experts.weight.data(),
                  .z = z_rows,
                  .grad_z = output_rows(grad_z, false),
                  .h = output_rows(h, false),
                  .grad_weight = grad_weight.data(),
              });

  Tensor grad_weights = torch::stable::full(sizes_of(weights), 0.0, ScalarType::Float);
  for (int64_t r = 0; r < experts.rows(); ++r)
    grad_weights.mutable_data_ptr<float>()[experts.routing.source[r]] = grad_weight[r];
  const auto none = [&] { return empty({0}, x.scalar_type()); };
  const int64_t* token = experts.token.data();
  const Factor z_factor{grad_z, nullptr}, y_factor{grad, token};
  return {
      multiply_and_combine(experts, grad_z, gate_up_matrices, nullptr),
      torch::stable::to(grad_weights, weights.scalar_type()),
      parameter_gradients ? weight_gradient(experts, z_factor, {x, token}) : none(),
      parameter_gradients && gate_up_bias ? bias_gradient(experts, *gate_up_bias, z_factor, nullptr) : none(),
      parameter_gradients ? weight_gradient(experts, y_factor, {h, nullptr}) : none(),
      parameter_gradients && down_bias ? bias_gradient(experts, *down_bias, y_factor, experts.weight.data()) : none(),
  };
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("fused_experts", TORCH_BOX(&fused_experts));
  m.impl("fused_experts_backward", TORCH_BOX(&fused_experts_backward));
}

}  // namespace mindspeed::cpu
