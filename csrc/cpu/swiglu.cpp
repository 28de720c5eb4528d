// torch.ops.mindspeed.swiglu and swiglu_backward on the CPU.
//
// The floor is memory traffic: forward reads two rows and writes one, backward reads three and writes two. The sigmoid
// is computed again in backward, which is cheaper than to write and read it.
#include "swiglu.h"

#include "common/cache.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace mindspeed::cpu {
namespace {

using torch::stable::empty;
using torch::stable::narrow;

// gate and up as two tensors, or as the two halves of one tensor's rows.
struct Halves {
  Tensor gate, up;

  Halves(const char* op, Tensor gate_or_both, const std::optional<Tensor>& separate_up)
      : gate(gate_or_both), up(separate_up.value_or(gate_or_both)) {
    const int64_t last = gate.dim() - 1;
    MINDSPEED_CHECK(last >= 0, op, ": gate must have at least one dimension");
    if (separate_up) {
      MINDSPEED_CHECK(same_shape(up, gate), op, ": up must have the shape of gate ", shape(gate), ", but has ",
                      shape(up));
      MINDSPEED_CHECK(up.scalar_type() == gate.scalar_type(), op, ": up must have the dtype of gate, ",
                      gate.scalar_type(), ", but has ", up.scalar_type());
    } else {
      const int64_t both = gate_or_both.size(last);
      MINDSPEED_CHECK(both % 2 == 0, op,
                      ": without up, the last dimension of gate must be even to hold [gate | up], but gate is ",
                      shape(gate_or_both));
      gate = narrow(gate_or_both, last, 0, both / 2);
      up = narrow(gate_or_both, last, both / 2, both / 2);
    }
  }
};

Tensor swiglu(const Tensor& gate_or_both, const std::optional<Tensor>& separate_up) {
  const Halves in("swiglu", gate_or_both, separate_up);
  Tensor y = empty(sizes_of(in.gate), in.gate.scalar_type());
  const Rows gate(in.gate), up(in.up);
  const int64_t length = y.size(y.dim() - 1);
  run_parallel(swiglu_forward_kernel, count_rows(y), length,
               SwigluForward{
                   .length = length,
                   .type = dtype_of(y, "swiglu", "gate"),
                   .gate = gate,
                   .up = up,
                   .y = output_rows(y, writes_past_cache(3 * bytes(y))),
               });
  return y;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_y, const Tensor& gate_or_both,
                                           const std::optional<Tensor>& separate_up) {
  constexpr const char* op = "swiglu_backward";
  const Halves in(op, gate_or_both, separate_up);
  MINDSPEED_CHECK(same_shape(grad_y, in.gate), op, ": grad_y must have the shape of y ", shape(in.gate), ", but has ",
                  shape(grad_y));
  MINDSPEED_CHECK(grad_y.scalar_type() == in.gate.scalar_type(), op, ": grad_y must have the dtype of gate, ",
                  in.gate.scalar_type(), ", but has ", grad_y.scalar_type());

  // The gradient of one concatenated tensor is one tensor too; the second one is then empty.
  Tensor grad_gate = empty(sizes_of(gate_or_both), grad_y.scalar_type());
  Tensor grad_up = separate_up ? empty(sizes_of(*separate_up), grad_y.scalar_type()) : empty({0}, grad_y.scalar_type());
  const Halves out(op, grad_gate, separate_up ? std::optional(grad_up) : std::nullopt);
  const Rows grad_y_rows(grad_y), gate(in.gate), up(in.up);
  const int64_t length = grad_y.size(grad_y.dim() - 1);
  const bool past_cache = writes_past_cache(5 * bytes(grad_y));
  run_parallel(swiglu_backward_kernel, count_rows(grad_y), length,
               SwigluBackward{
                   .length = length,
                   .type = dtype_of(grad_y, op, "gate"),
                   .grad_y = grad_y_rows,
                   .gate = gate,
                   .up = up,
                   .grad_gate = output_rows(out.gate, past_cache),
                   .grad_up = output_rows(out.up, past_cache),
               });
  return {grad_gate, grad_up};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}

}  // namespace mindspeed::cpu
