#include "swiglu.h"

#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {

void swiglu_forward_kernel(const SwigluForward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t r = begin; r < end; ++r) {
      const T *gate = row<T>(args.gate, r), *up = row<T>(args.up, r);
      T* y = row<T>(args.y, r);
      const bool past_cache = args.y.past_cache;
      for_each_vector(args.length, [&](int64_t i, auto lanes) {
        const Vec g = load(gate + i, lanes);
        store(y + i, g * sigmoid(g) * load(up + i, lanes), lanes, past_cache);
      });
    }
  });
}

// silu(g) = g σ(g) and σ' = σ (1 − σ), so that silu'(g) = σ + g σ (1 − σ).
void swiglu_backward_kernel(const SwigluBackward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t r = begin; r < end; ++r) {
      const T *grad_y = row<T>(args.grad_y, r), *gate = row<T>(args.gate, r), *up = row<T>(args.up, r);
      T *grad_gate = row<T>(args.grad_gate, r), *grad_up = row<T>(args.grad_up, r);
      const bool past_cache = args.grad_gate.past_cache && args.grad_up.past_cache;
      for_each_vector(args.length, [&](int64_t i, auto lanes) {
        const Vec g = load(gate + i, lanes), gradient = load(grad_y + i, lanes);
        const Vec s = sigmoid(g), silu = g * s;
        store(grad_gate + i, gradient * load(up + i, lanes) * (s + silu * (1.0f - s)), lanes, past_cache);
        store(grad_up + i, gradient * silu, lanes, past_cache);
      });
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
