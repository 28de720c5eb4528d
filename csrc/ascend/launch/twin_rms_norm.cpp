#include "kernels/rms_norm_backward.h"
#include "twin.h"

using namespace mindspeed::ascend;

namespace {

// The pairs of types that the operator has: y is as x, or float32 because the weight is.
template <class F>
void with_types(int x_type, int y_type, F f) {
  with_type(x_type, [&](auto x) {
    if (x_type == y_type) return f(x, x);
    f(x, float());
  });
}

}  // namespace

extern "C" {

// residual and sum may be null together; weight may be null.
char* twin_rms_norm_forward(Run how, int x_type, int y_type, const void* x, const void* residual, const float* weight,
                            void* y, void* sum, float* rstd, int64_t rows, int64_t hidden, float eps,
                            bool round_before_weight) {
  const int64_t elements = rows * hidden;
  RmsNormTiling tiling{};
  tiling.tiles =
      rms_norm_tiles(rows, hidden, bytes_of(x_type), bytes_of(y_type), residual != nullptr, false, how.blocks);
  tiling.eps = eps;
  tiling.has_weight = weight != nullptr;
  tiling.has_residual = residual != nullptr;
  tiling.round_before_weight = round_before_weight;
  const std::vector<GlobalBuffer> buffers = {
      input("x", x, elements * bytes_of(x_type)),
      input("residual", residual, elements * bytes_of(x_type)),
      input("weight", weight, hidden * 4),
      output("y", y, elements * bytes_of(y_type)),
      output("sum", sum, elements * bytes_of(x_type)),
      output("rstd", rstd, rows * 4),
  };
  return run("rms_norm_forward", Cores::kVector, how, buffers, [&] {
    with_types(x_type, y_type, [&](auto x_element, auto y_element) {
      RmsNormForward<decltype(x_element), decltype(y_element)> kernel;
      kernel.Init(gm(x), gm(residual), gm(weight), gm(y), gm(sum), gm(rstd), tiling);
      kernel.Process();
    });
  });
}

// grad_sum and weight may be null, and so may grad_weight. workspace: [blocks, hidden]
char* twin_rms_norm_backward(Run how, int x_type, int y_type, const void* grad_y, const void* grad_sum, const void* x,
                             const float* weight, const float* rstd, void* grad_x, float* grad_weight,
                             float* partial_sums, int64_t rows, int64_t hidden, bool round_before_weight) {
  if (hidden > kRmsNormMaxHidden) {
    return refuse("rms_norm_backward", "hidden is ", hidden, ", but at most ", kRmsNormMaxHidden);
  }
  const int64_t elements = rows * hidden;
  RmsNormTiling tiling{};
  tiling.tiles =
      rms_norm_tiles(rows, hidden, bytes_of(x_type), bytes_of(y_type), grad_sum != nullptr, true, how.blocks);
  tiling.has_weight = weight != nullptr;
  tiling.has_residual = grad_sum != nullptr;
  tiling.round_before_weight = round_before_weight;
  tiling.weight_gradient = grad_weight != nullptr;
  const std::vector<GlobalBuffer> buffers = {
      input("grad_y", grad_y, elements * bytes_of(y_type)),
      input("grad_sum", grad_sum, elements * bytes_of(x_type)),
      input("x", x, elements * bytes_of(x_type)),
      input("weight", weight, hidden * 4),
      input("rstd", rstd, rows * 4),
      output("grad_x", grad_x, elements * bytes_of(x_type)),
      output("grad_weight", grad_weight, hidden * 4),
      workspace(partial_sums, how.blocks * hidden * 4),
  };
  return run("rms_norm_backward", Cores::kVector, how, buffers, [&] {
    with_types(x_type, y_type, [&](auto x_element, auto y_element) {
      RmsNormBackward<decltype(x_element), decltype(y_element)> kernel;
      kernel.Init(gm(grad_y), gm(grad_sum), gm(x), gm(weight), gm(rstd), gm(grad_x), gm(grad_weight), gm(partial_sums),
                  tiling);
      kernel.Process();
    });
  });
}
}
