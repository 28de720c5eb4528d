#include "kernels/grouped_gemm.h"
#include "twin.h"

using namespace mindspeed::ascend;

extern "C" {

// offsets is int32 [groups]; rows are those of all groups.
char* twin_grouped_gemm(Run how, int type, const void* x, const void* weight, const int32_t* offsets, void* y,
                        int64_t rows, int64_t groups, int64_t k, int64_t n, bool transposed) {
  if (std::max(k, n) > kMaxMatrixStride) {
    return refuse("grouped_gemm", "k ", k, " and n ", n, " are at most ", kMaxMatrixStride);
  }
  const GroupedGemmTiling tiling{groups, k, n, transposed};
  const int64_t size = bytes_of(type);
  const std::vector<GlobalBuffer> buffers = {
      input("x", x, rows * k * size),
      input("weight", weight, groups * k * n * size),
      input("offsets", offsets, groups * 4),
      output("y", y, rows * n * size),
  };
  return run("grouped_gemm", Cores::kCube, how, buffers, [&] {
    with_half_type(type, [&](auto element) {
      GroupedGemm<decltype(element)> kernel;
      kernel.Init(gm(x), gm(weight), gm(offsets), gm(y), tiling);
      kernel.Process();
    });
  });
}

// grad_weight holds zeros.
char* twin_grouped_gemm_weight_gradient(Run how, int type, const void* grad_y, const void* x, const int32_t* offsets,
                                        void* grad_weight, int64_t rows, int64_t groups, int64_t k, int64_t n,
                                        bool transposed) {
  if (std::max(k, n) > kMaxMatrixStride) {
    return refuse("grouped_gemm_weight_gradient", "k ", k, " and n ", n, " are at most ", kMaxMatrixStride);
  }
  const GroupedGemmTiling tiling{groups, k, n, transposed};
  const int64_t size = bytes_of(type);
  const std::vector<GlobalBuffer> buffers = {
      input("grad_y", grad_y, rows * n * size),
      input("x", x, rows * k * size),
      input("offsets", offsets, groups * 4),
      {"grad_weight", grad_weight, uint64_t(groups * k * n * size), Use::kInOut},
  };
  return run("grouped_gemm_weight_gradient", Cores::kCube, how, buffers, [&] {
    with_half_type(type, [&](auto element) {
      GroupedGemmWeightGradient<decltype(element)> kernel;
      kernel.Init(gm(grad_y), gm(x), gm(offsets), gm(grad_weight), tiling);
      kernel.Process();
    });
  });
}
}
