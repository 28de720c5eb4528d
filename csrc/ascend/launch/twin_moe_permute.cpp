#include "kernels/moe_permute.h"
#include "twin.h"

using namespace mindspeed::ascend;

namespace {

template <class Kernel>
MoeTiling tiling_of(int64_t rows, int64_t hidden, int64_t top_k, bool weighted, int64_t element_bytes) {
  return {rows, hidden, top_k, moe_columns(hidden, element_bytes, Kernel::kFloats, Kernel::kValues), weighted};
}

}  // namespace

extern "C" {

char* twin_moe_permute(Run how, int type, const void* x, const int64_t* source, void* y, int64_t tokens, int64_t top_k,
                       int64_t hidden) {
  const int64_t size = bytes_of(type), rows = tokens * top_k;
  const std::vector<GlobalBuffer> buffers = {
      input("x", x, tokens * hidden * size),
      input("source", source, rows * 8),
      output("y", y, rows * hidden * size),
  };
  return run("moe_permute", Cores::kVector, how, buffers, [&] {
    with_type(type, [&](auto element) {
      using Kernel = MoePermute<decltype(element)>;
      Kernel kernel;
      kernel.Init(gm(x), gm(source), gm(y), tiling_of<Kernel>(rows, hidden, top_k, false, size));
      kernel.Process();
    });
  });
}

// weights may be null.
char* twin_moe_unpermute(Run how, int type, const void* y, const int64_t* position, const float* weights, void* out,
                         int64_t tokens, int64_t top_k, int64_t hidden) {
  const int64_t size = bytes_of(type), rows = tokens * top_k;
  const std::vector<GlobalBuffer> buffers = {
      input("y", y, rows * hidden * size),
      input("position", position, rows * 8),
      input("weights", weights, rows * 4),
      output("out", out, tokens * hidden * size),
  };
  return run("moe_unpermute", Cores::kVector, how, buffers, [&] {
    with_type(type, [&](auto element) {
      using Kernel = MoeUnpermute<decltype(element)>;
      Kernel kernel;
      kernel.Init(gm(y), gm(position), gm(weights), gm(out),
                  tiling_of<Kernel>(tokens, hidden, top_k, weights != nullptr, size));
      kernel.Process();
    });
  });
}

// grad_weights holds zeros.
char* twin_moe_unpermute_backward(Run how, int type, const void* grad_out, const void* y, const int64_t* source,
                                  const float* weights, void* grad_y, float* grad_weights, int64_t tokens,
                                  int64_t top_k, int64_t hidden) {
  const int64_t size = bytes_of(type), rows = tokens * top_k;
  const std::vector<GlobalBuffer> buffers = {
      input("grad_out", grad_out, tokens * hidden * size),
      input("y", y, rows * hidden * size),
      input("source", source, rows * 8),
      input("weights", weights, rows * 4),
      output("grad_y", grad_y, rows * hidden * size),
      {"grad_weights", grad_weights, uint64_t(rows * 4), Use::kInOut},
  };
  return run("moe_unpermute_backward", Cores::kVector, how, buffers, [&] {
    with_type(type, [&](auto element) {
      using Kernel = MoeUnpermuteBackward<decltype(element)>;
      Kernel kernel;
      kernel.Init(gm(grad_out), gm(y), gm(source), gm(weights), gm(grad_y), gm(grad_weights),
                  tiling_of<Kernel>(rows, hidden, top_k, true, size));
      kernel.Process();
    });
  });
}
}
