#include "device.h"

namespace mindspeed::ascend {

namespace {

// What x̂ is multiplied by: float32, or nothing.
Tensor factor_of(const optional<Tensor>& weight, bool zero_centered) {
  if (!weight) return {};
  const Tensor wide = weight->to(at::kFloat).contiguous();
  return zero_centered ? wide + 1 : wide;
}

at::ScalarType y_type(const Tensor& x, const optional<Tensor>& weight, bool round_before_weight) {
  return round_before_weight && weight ? at::promote_types(x.scalar_type(), weight->scalar_type()) : x.scalar_type();
}

struct Forward {
  Tensor y, sum, rstd;
};

Forward forward(const Tensor& x, const Tensor& residual, const optional<Tensor>& weight, double eps, bool zero_centered,
                bool round_before_weight) {
  const Tensor rows = as_matrix(x), residual_rows = residual.defined() ? as_matrix(residual) : Tensor();
  const Tensor factor = factor_of(weight, zero_centered);
  const Tensor y = at::empty(x.sizes(), x.options().dtype(y_type(x, weight, round_before_weight)));
  const Tensor sum = residual.defined() ? at::empty(x.sizes(), x.options()) : Tensor();
  const Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  const int32_t blocks = vector_cores();
  RmsNormTiling tiling{};
  tiling.tiles = rms_norm_tiles(rows.size(0), rows.size(1), rows.element_size(), y.element_size(), residual.defined(),
                                false, blocks);
  tiling.eps = float(eps);
  tiling.has_weight = factor.defined();
  tiling.has_residual = residual.defined();
  tiling.round_before_weight = round_before_weight;
  enqueue("mindspeed_rms_norm", [=](void* stream) {
    launch_rms_norm({blocks, stream}, type_of(rows), type_of(y), input("x", rows), input("residual", residual_rows),
                    input("weight", factor), output("y", y), output("sum", sum), output("rstd", rstd), tiling);
  });
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, bool zero_centered,
                                    bool round_before_weight) {
  const Forward found = forward(x, {}, weight, eps, zero_centered, round_before_weight);
  return {found.y, found.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const optional<Tensor>& weight,
                                                double eps, bool zero_centered, bool round_before_weight) {
  const Forward found = forward(x, residual, weight, eps, zero_centered, round_before_weight);
  return {found.y, found.sum, found.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_y, const optional<Tensor>& grad_sum, const Tensor& x,
                                             const optional<Tensor>& weight, const Tensor& rstd, bool zero_centered,
                                             bool round_before_weight, bool weight_gradient) {
  const Tensor rows = as_matrix(x), grad_rows = as_matrix(grad_y), numbers = rstd.contiguous();
  const Tensor grad_sum_rows = grad_sum ? as_matrix(*grad_sum) : Tensor();
  const Tensor factor = factor_of(weight, zero_centered);
  const Tensor grad_x = at::empty(x.sizes(), x.options());
  const int64_t count = rows.size(0), hidden = rows.size(1);
  const bool wanted = weight && weight_gradient;
  const Tensor grad_factor = wanted ? at::empty({hidden}, x.options().dtype(at::kFloat)) : Tensor();
  const int32_t blocks = vector_cores();
  const Tensor memory = make_workspace(x, blocks * hidden * 4);
  RmsNormTiling tiling{};
  tiling.tiles =
      rms_norm_tiles(count, hidden, rows.element_size(), grad_rows.element_size(), grad_sum.has_value(), true, blocks);
  tiling.has_weight = factor.defined();
  tiling.has_residual = grad_sum.has_value();
  tiling.round_before_weight = round_before_weight;
  tiling.weight_gradient = wanted;
  enqueue("mindspeed_rms_norm_backward", [=](void* stream) {
    launch_rms_norm_backward({blocks, stream}, type_of(rows), type_of(grad_rows), input("grad_y", grad_rows),
                             input("grad_sum", grad_sum_rows), input("x", rows), input("weight", factor),
                             input("rstd", numbers), output("grad_x", grad_x), output("grad_weight", grad_factor),
                             workspace(memory), tiling);
  });
  if (!wanted) return {grad_x, at::empty({0}, (weight ? *weight : x).options())};
  return {grad_x, grad_factor.to(weight->scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(mindspeed, PrivateUse1, m) {
  m.impl("rms_norm", TORCH_FN(rms_norm));
  m.impl("add_rms_norm", TORCH_FN(add_rms_norm));
  m.impl("rms_norm_backward", TORCH_FN(rms_norm_backward));
}

}  // namespace mindspeed::ascend
