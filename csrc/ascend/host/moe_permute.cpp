#include "device.h"

namespace mindspeed::ascend {

namespace {

// The sorting is PyTorch's, the rows are moved by the kernels.
std::tuple<Tensor, Tensor, Tensor> moe_permute(const Tensor& x, const Tensor& expert_index, int64_t num_experts) {
  const Tensor flat = expert_index.flatten();
  const Tensor elsewhere = flat.lt(0).logical_or(flat.ge(num_experts));
  const Tensor known = flat.masked_fill(elsewhere, num_experts);  // the skipped ones come last
  const auto [expert, order] = at::sort(known, /*stable=*/optional<bool>(true), /*dim=*/0, /*descending=*/false);
  const Tensor source = order.masked_fill(expert.eq(num_experts), -1);
  const Tensor experts = at::arange(num_experts, expert.options());
  const Tensor offsets = at::searchsorted(expert, experts, /*out_int32=*/true, /*right=*/true);

  const Tensor rows = x.contiguous();
  const Tensor sorted = at::empty({source.size(0), x.size(1)}, x.options());
  const MoeTiling tiling{source.size(0), x.size(1), expert_index.size(1),
                         moe_columns(x.size(1), x.element_size(), kMoePermute), false};
  const int32_t blocks = vector_cores();
  enqueue("mindspeed_moe_permute", [=](void* stream) {
    launch_moe_permute({blocks, stream}, type_of(rows), input("x", rows), input("source", source), output("y", sorted),
                       tiling);
  });
  return {sorted, offsets, source};
}

// The sorted row of each assignment, -1 where it has none.
Tensor positions(const Tensor& source) {
  const int64_t rows = source.size(0);
  const Tensor known = at::full({rows + 1}, -1, source.options());
  const Tensor row = source.masked_fill(source.lt(0), rows);  // the last element takes what belongs nowhere
  return known.scatter(0, row, at::arange(rows, source.options())).narrow(0, 0, rows);
}

Tensor moe_unpermute(const Tensor& y_sorted, const Tensor& source, const optional<Tensor>& weights, int64_t top_k) {
  const Tensor rows = y_sorted.contiguous(), position = positions(source);
  const Tensor factors = weights ? weights->to(at::kFloat).contiguous() : Tensor();
  const int64_t tokens = source.size(0) / top_k, hidden = y_sorted.size(1);
  const Tensor out = at::empty({tokens, hidden}, y_sorted.options());
  const MoeTiling tiling{tokens, hidden, top_k, moe_columns(hidden, out.element_size(), kMoeUnpermute),
                         factors.defined()};
  const int32_t blocks = vector_cores();
  enqueue("mindspeed_moe_unpermute", [=](void* stream) {
    launch_moe_unpermute({blocks, stream}, type_of(rows), input("y", rows), input("position", position),
                         input("weights", factors), output("out", out), tiling);
  });
  return out;
}

std::tuple<Tensor, Tensor> moe_unpermute_backward(const Tensor& grad, const optional<Tensor>& y_sorted,
                                                  const Tensor& source, const optional<Tensor>& weights,
                                                  int64_t top_k) {
  const Tensor grad_out = grad.contiguous(), sources = source.contiguous();
  const int64_t rows = source.size(0), hidden = grad.size(1);
  const int32_t blocks = vector_cores();
  const Tensor grad_y = at::empty({rows, hidden}, grad.options());
  if (!weights || !y_sorted) {  // a row's gradient is its token's
    const MoeTiling tiling{rows, hidden, top_k, moe_columns(hidden, grad.element_size(), kMoePermute), false};
    enqueue("mindspeed_moe_unpermute_backward", [=](void* stream) {
      launch_moe_permute({blocks, stream}, type_of(grad_out), input("grad_out", grad_out), input("source", sources),
                         output("grad_y", grad_y), tiling);
    });
    return {grad_y, at::empty({0, top_k}, grad.options().dtype(at::kFloat))};
  }
  const Tensor y = y_sorted->contiguous(), factors = weights->to(at::kFloat).contiguous();
  const Tensor grad_weights = at::zeros(weights->sizes(), factors.options());
  const MoeTiling tiling{rows, hidden, top_k, moe_columns(hidden, grad.element_size(), kMoeUnpermuteBackward), true};
  enqueue("mindspeed_moe_unpermute_backward", [=](void* stream) {
    launch_moe_unpermute_backward({blocks, stream}, type_of(grad_out), input("grad_out", grad_out), input("y", y),
                                  input("source", sources), input("weights", factors), output("grad_y", grad_y),
                                  in_out("grad_weights", grad_weights), tiling);
  });
  return {grad_y, grad_weights.to(weights->scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(mindspeed, PrivateUse1, m) {
  m.impl("moe_permute", TORCH_FN(moe_permute));
  m.impl("moe_unpermute", TORCH_FN(moe_unpermute));
  m.impl("moe_unpermute_backward", TORCH_FN(moe_unpermute_backward));
}

}  // namespace mindspeed::ascend
