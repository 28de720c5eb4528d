#include "twin.h"

using namespace mindspeed::ascend;

extern "C" {

// offsets is int32 [groups]; rows are those of all groups.
char* twin_grouped_gemm(Run how, Type type, const void* x, const void* weight, const int32_t* offsets, void* y,
                        int64_t rows, int64_t groups, int64_t k, int64_t n, bool transposed) {
  if (std::max(k, n) > kMaxMatrixStride) {
    return refuse("grouped_gemm", "k ", k, " and n ", n, " are at most ", kMaxMatrixStride);
  }
  const int64_t size = bytes_of(type);
  return run(how, [&](const Launch& launch) {
    launch_grouped_gemm(launch, type, input("x", x, rows * k * size), input("weight", weight, groups * k * n * size),
                        input("offsets", offsets, groups * 4), output("y", y, rows * n * size),
                        {groups, k, n, transposed});
  });
}

// grad_weight holds zeros.
char* twin_grouped_gemm_weight_gradient(Run how, Type type, const void* grad_y, const void* x, const int32_t* offsets,
                                        void* grad_weight, int64_t rows, int64_t groups, int64_t k, int64_t n,
                                        bool transposed) {
  if (std::max(k, n) > kMaxMatrixStride) {
    return refuse("grouped_gemm_weight_gradient", "k ", k, " and n ", n, " are at most ", kMaxMatrixStride);
  }
  const int64_t size = bytes_of(type);
  return run(how, [&](const Launch& launch) {
    launch_grouped_gemm_weight_gradient(launch, type, input("grad_y", grad_y, rows * n * size),
                                        input("x", x, rows * k * size), input("offsets", offsets, groups * 4),
                                        in_out("grad_weight", grad_weight, groups * k * n * size),
                                        {groups, k, n, transposed});
  });
}
}
