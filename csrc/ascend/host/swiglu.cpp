#include "device.h"

namespace mindspeed::ascend {

namespace {

// gate and up as rows: two matrices, or the halves of one, which is then `both`.
struct Halves {
  Tensor gate, up, both;
  int64_t rows, length, stride;

  Halves(const Tensor& gate_or_both, const optional<Tensor>& separate_up) {
    gate = as_matrix(gate_or_both);
    rows = gate.size(0), length = gate.size(1);
    stride = length;
    if (separate_up) {
      up = as_matrix(*separate_up);
      return;
    }
    both = gate, length /= 2;
    gate = both.narrow(1, 0, length), up = both.narrow(1, length, length);
  }

  SwigluTiling tiling(bool backward, int32_t blocks) const {
    return swiglu_tiling(rows, length, stride, stride, gate.element_size(), backward, blocks);
  }
};

Tensor swiglu(const Tensor& gate, const optional<Tensor>& up) {
  const Halves in(gate, up);
  std::vector<int64_t> sizes = gate.sizes().vec();
  sizes.back() = in.length;
  const Tensor y = at::empty(sizes, gate.options());
  const int32_t blocks = vector_cores();
  const SwigluTiling tiling = in.tiling(false, blocks);
  enqueue("mindspeed_swiglu", [=](void* stream) {
    launch_swiglu({blocks, stream}, type_of(y), input("gate", in.gate), input("up", in.up), output("y", y), tiling);
  });
  return y;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_y, const Tensor& gate, const optional<Tensor>& up) {
  const Halves in(gate, up);
  const Tensor grad = as_matrix(grad_y);
  const Tensor grad_gate = at::empty(gate.sizes(), gate.options());
  const Tensor grad_up = at::empty(up ? up->sizes() : at::IntArrayRef{0}, gate.options());
  const Halves out(grad_gate, up ? optional<Tensor>(grad_up) : std::nullopt);
  const int32_t blocks = vector_cores();
  const SwigluTiling tiling = in.tiling(true, blocks);
  enqueue("mindspeed_swiglu_backward", [=](void* stream) {
    launch_swiglu_backward({blocks, stream}, type_of(grad), input("grad_y", grad), input("gate", in.gate),
                           input("up", in.up), output("grad_gate", out.gate), output("grad_up", out.up), tiling);
  });
  return {grad_gate, grad_up};
}

}  // namespace

TORCH_LIBRARY_IMPL(mindspeed, PrivateUse1, m) {
  m.impl("swiglu", TORCH_FN(swiglu));
  m.impl("swiglu_backward", TORCH_FN(swiglu_backward));
}

}  // namespace mindspeed::ascend
