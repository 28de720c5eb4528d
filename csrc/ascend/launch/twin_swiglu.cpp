#include "kernels/swiglu.h"
#include "twin.h"

using namespace mindspeed::ascend;

namespace {

// gate and up: two tensors, or the halves of the rows of one.
std::vector<GlobalBuffer> halves(GlobalBuffer (*use)(const char*, void*, int64_t), const char* name, void* gate,
                                 void* up, bool concatenated, int64_t bytes) {
  if (concatenated) return {use(name, gate, 2 * bytes)};
  return {use(name, gate, bytes), use("its partner", up, bytes)};
}

GlobalBuffer in(const char* name, void* data, int64_t bytes) { return input(name, data, bytes); }

}  // namespace

extern "C" {

char* twin_swiglu_forward(Run how, int type, void* gate, void* up, void* y, int64_t rows, int64_t length,
                          bool concatenated) {
  const int64_t bytes = rows * length * bytes_of(type), stride = concatenated ? 2 * length : length;
  const SwigluTiling tiling = swiglu_tiling(rows, length, stride, stride, bytes_of(type), false, how.blocks);
  std::vector<GlobalBuffer> buffers = halves(in, "gate", gate, up, concatenated, bytes);
  buffers.push_back(output("y", y, bytes));
  return run("swiglu_forward", Cores::kVector, how, buffers, [&] {
    with_type(type, [&](auto element) {
      SwigluForward<decltype(element)> kernel;
      kernel.Init(gm(gate), gm(up), gm(y), tiling);
      kernel.Process();
    });
  });
}

char* twin_swiglu_backward(Run how, int type, void* grad_y, void* gate, void* up, void* grad_gate, void* grad_up,
                           int64_t rows, int64_t length, bool concatenated) {
  const int64_t bytes = rows * length * bytes_of(type), stride = concatenated ? 2 * length : length;
  const SwigluTiling tiling = swiglu_tiling(rows, length, stride, stride, bytes_of(type), true, how.blocks);
  std::vector<GlobalBuffer> buffers = halves(in, "gate", gate, up, concatenated, bytes);
  for (GlobalBuffer& buffer : halves(output, "grad_gate", grad_gate, grad_up, concatenated, bytes)) {
    buffers.push_back(std::move(buffer));
  }
  buffers.push_back(input("grad_y", grad_y, bytes));
  return run("swiglu_backward", Cores::kVector, how, buffers, [&] {
    with_type(type, [&](auto element) {
      SwigluBackward<decltype(element)> kernel;
      kernel.Init(gm(grad_y), gm(gate), gm(up), gm(grad_gate), gm(grad_up), tiling);
      kernel.Process();
    });
  });
}
}
