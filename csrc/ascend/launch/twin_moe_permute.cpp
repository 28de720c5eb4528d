#include "twin.h"

using namespace mindspeed::ascend;

extern "C" {

char* twin_moe_permute(Run how, Type type, const void* x, const int64_t* source, void* y, int64_t tokens, int64_t top_k,
                       int64_t hidden) {
  const int64_t size = bytes_of(type), rows = tokens * top_k;
  const MoeTiling tiling{rows, hidden, top_k, moe_columns(hidden, size, kMoePermute), false};
  return run(how, [&](const Launch& launch) {
    launch_moe_permute(launch, type, input("x", x, tokens * hidden * size), input("source", source, rows * 8),
                       output("y", y, rows * hidden * size), tiling);
  });
}

// weights may be null.
char* twin_moe_unpermute(Run how, Type type, const void* y, const int64_t* position, const float* weights, void* out,
                         int64_t tokens, int64_t top_k, int64_t hidden) {
  const int64_t size = bytes_of(type), rows = tokens * top_k;
  const MoeTiling tiling{tokens, hidden, top_k, moe_columns(hidden, size, kMoeUnpermute), weights != nullptr};
  return run(how, [&](const Launch& launch) {
    launch_moe_unpermute(launch, type, input("y", y, rows * hidden * size), input("position", position, rows * 8),
                         input("weights", weights, rows * 4), output("out", out, tokens * hidden * size), tiling);
  });
}

// grad_weights holds zeros.
char* twin_moe_unpermute_backward(Run how, Type type, const void* grad_out, const void* y, const int64_t* source,
                                  const float* weights, void* grad_y, float* grad_weights, int64_t tokens,
                                  int64_t top_k, int64_t hidden) {
  const int64_t size = bytes_of(type), rows = tokens * top_k;
  const MoeTiling tiling{rows, hidden, top_k, moe_columns(hidden, size, kMoeUnpermuteBackward), true};
  return run(how, [&](const Launch& launch) {
    launch_moe_unpermute_backward(launch, type, input("grad_out", grad_out, tokens * hidden * size),
                                  input("y", y, rows * hidden * size), input("source", source, rows * 8),
                                  input("weights", weights, rows * 4), output("grad_y", grad_y, rows * hidden * size),
                                  in_out("grad_weights", grad_weights, rows * 4), tiling);
  });
}
}
