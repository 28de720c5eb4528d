#include "twin.h"

using namespace mindspeed::ascend;

extern "C" {

// residual and sum may be null together; weight may be null.
char* twin_rms_norm_forward(Run how, Type x_type, Type y_type, const void* x, const void* residual, const float* weight,
                            void* y, void* sum, float* rstd, int64_t rows, int64_t hidden, float eps,
                            bool round_before_weight) {
  const int64_t x_bytes = rows * hidden * bytes_of(x_type), y_bytes = rows * hidden * bytes_of(y_type);
  RmsNormTiling tiling{};
  tiling.tiles =
      rms_norm_tiles(rows, hidden, bytes_of(x_type), bytes_of(y_type), residual != nullptr, false, how.blocks);
  tiling.eps = eps;
  tiling.has_weight = weight != nullptr;
  tiling.has_residual = residual != nullptr;
  tiling.round_before_weight = round_before_weight;
  return run(how, [&](const Launch& launch) {
    launch_rms_norm(launch, x_type, y_type, input("x", x, x_bytes), input("residual", residual, x_bytes),
                    input("weight", weight, hidden * 4), output("y", y, y_bytes), output("sum", sum, x_bytes),
                    output("rstd", rstd, rows * 4), tiling);
  });
}

// grad_sum and weight may be null, and so may grad_weight. workspace: [blocks, hidden]
char* twin_rms_norm_backward(Run how, Type x_type, Type y_type, const void* grad_y, const void* grad_sum, const void* x,
                             const float* weight, const float* rstd, void* grad_x, float* grad_weight,
                             float* partial_sums, int64_t rows, int64_t hidden, bool round_before_weight) {
  if (hidden > kRmsNormMaxHidden) {
    return refuse("rms_norm_backward", "hidden is ", hidden, ", but at most ", kRmsNormMaxHidden);
  }
  const int64_t x_bytes = rows * hidden * bytes_of(x_type), y_bytes = rows * hidden * bytes_of(y_type);
  RmsNormTiling tiling{};
  tiling.tiles =
      rms_norm_tiles(rows, hidden, bytes_of(x_type), bytes_of(y_type), grad_sum != nullptr, true, how.blocks);
  tiling.has_weight = weight != nullptr;
  tiling.has_residual = grad_sum != nullptr;
  tiling.round_before_weight = round_before_weight;
  tiling.weight_gradient = grad_weight != nullptr;
  return run(how, [&](const Launch& launch) {
    launch_rms_norm_backward(launch, x_type, y_type, input("grad_y", grad_y, y_bytes),
                             input("grad_sum", grad_sum, x_bytes), input("x", x, x_bytes),
                             input("weight", weight, hidden * 4), input("rstd", rstd, rows * 4),
                             output("grad_x", grad_x, x_bytes), output("grad_weight", grad_weight, hidden * 4),
                             workspace(partial_sums, how.blocks * hidden * 4), tiling);
  });
}
}
