#include "device.h"

namespace mindspeed::ascend {

namespace {

// [groups, k, n] of a weight, which may be a view that transposes a contiguous one: no copy for those.
struct Weight {
  Tensor matrices;
  bool transposed;

  Weight(const Tensor& weight, bool is_transposed) : matrices(weight), transposed(is_transposed) {
    if (!weight.is_contiguous() && weight.transpose(1, 2).is_contiguous()) {
      matrices = weight.transpose(1, 2), transposed = !transposed;
    }
    matrices = matrices.contiguous();
  }

  int64_t k() const { return matrices.size(transposed ? 1 : 2); }
  int64_t n() const { return matrices.size(transposed ? 2 : 1); }
};

Tensor grouped_gemm(const Tensor& x, const Tensor& weight, const Tensor& offsets, bool transposed) {
  const Weight matrices(weight, transposed);
  const Tensor rows = x.contiguous(), ends = offsets.to(at::kInt).contiguous();
  const Tensor y = at::zeros({x.size(0), matrices.n()}, x.options());  // rows after the last group stay 0
  const GroupedGemmTiling tiling{ends.size(0), matrices.k(), matrices.n(), matrices.transposed};
  const int32_t blocks = cube_cores();
  enqueue("mindspeed_grouped_gemm", [=](void* stream) {
    launch_grouped_gemm({blocks, stream}, type_of(rows), input("x", rows), input("weight", matrices.matrices),
                        input("offsets", ends), in_out("y", y), tiling);
  });
  return y;
}

Tensor grouped_gemm_weight_gradient(const Tensor& grad_y, const Tensor& x, const Tensor& offsets, bool transposed) {
  const Tensor grad_rows = grad_y.contiguous(), rows = x.contiguous(), ends = offsets.to(at::kInt).contiguous();
  const int64_t groups = ends.size(0), k = x.size(1), n = grad_y.size(1);
  const Tensor grad = at::zeros({groups, transposed ? k : n, transposed ? n : k}, x.options());
  const GroupedGemmTiling tiling{groups, k, n, transposed};
  const int32_t blocks = cube_cores();
  enqueue("mindspeed_grouped_gemm_weight_gradient", [=](void* stream) {
    launch_grouped_gemm_weight_gradient({blocks, stream}, type_of(rows), input("grad_y", grad_rows), input("x", rows),
                                        input("offsets", ends), in_out("grad_weight", grad), tiling);
  });
  return grad;
}

}  // namespace

TORCH_LIBRARY_IMPL(mindspeed, PrivateUse1, m) {
  m.impl("grouped_gemm", TORCH_FN(grouped_gemm));
  m.impl("grouped_gemm_weight_gradient", TORCH_FN(grouped_gemm_weight_gradient));
}

}  // namespace mindspeed::ascend
