#include "twin.h"

using namespace mindspeed::ascend;

namespace {

// Bytes from the first to the last element of gate or up, which may be halves of rows.
int64_t extent(Type type, int64_t rows, int64_t length, int64_t stride) {
  return ((rows - 1) * stride + length) * bytes_of(type);
}

}  // namespace

extern "C" {

char* twin_swiglu_forward(Run how, Type type, void* gate, void* up, void* y, int64_t rows, int64_t length,
                          bool concatenated) {
  const int64_t stride = concatenated ? 2 * length : length, bytes = extent(type, rows, length, stride);
  const SwigluTiling tiling = swiglu_tiling(rows, length, stride, stride, bytes_of(type), false, how.blocks);
  return run(how, [&](const Launch& launch) {
    launch_swiglu(launch, type, input("gate", gate, bytes), input("up", up, bytes),
                  output("y", y, rows * length * bytes_of(type)), tiling);
  });
}

char* twin_swiglu_backward(Run how, Type type, void* grad_y, void* gate, void* up, void* grad_gate, void* grad_up,
                           int64_t rows, int64_t length, bool concatenated) {
  const int64_t stride = concatenated ? 2 * length : length, bytes = extent(type, rows, length, stride);
  const SwigluTiling tiling = swiglu_tiling(rows, length, stride, stride, bytes_of(type), true, how.blocks);
  return run(how, [&](const Launch& launch) {
    launch_swiglu_backward(launch, type, input("grad_y", grad_y, rows * length * bytes_of(type)),
                           input("gate", gate, bytes), input("up", up, bytes), output("grad_gate", grad_gate, bytes),
                           output("grad_up", grad_up, bytes), tiling);
  });
}
}
