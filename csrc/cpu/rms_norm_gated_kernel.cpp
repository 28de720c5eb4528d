#include "rms_norm_gated.h"

#include <algorithm>

#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// a(gate) and its derivative.
struct Gate {
  Vec value, slope;
};

inline Gate activate(Vec gate, bool only_sigmoid) {
  const Vec s = sigmoid(gate);
  if (only_sigmoid) return {s, s * (1.0f - s)};
  return {gate * s, s + gate * s * (1.0f - s)};
}

// One row; returns rstd.
template <class T>
float normalize(const T* x, const T* gate, T* y, const RmsNormGatedForward& args) {
  const float square_sum = sum_over(args.hidden, [&](int64_t i, auto lanes) {
    const Vec v = load(x + i, lanes);
    return v * v;
  });
  const float rstd = 1.0f / __builtin_sqrtf(square_sum / args.hidden + args.eps);
  for_each_vector(args.hidden, [&](int64_t i, auto lanes) {
    const Vec normalized = load(x + i, lanes) * rstd * load(args.weight + i, lanes);
    store(y + i, normalized * activate(load(gate + i, lanes), args.sigmoid).value, lanes, args.y.past_cache);
  });
  return rstd;
}

// One row. With g = grad_y · weight · a(gate):
//   grad_x = rstd · (g − x̂ · mean(g · x̂))    grad_gate = grad_y · weight · x̂ · a'(gate)
//   grad_weight += grad_y · a(gate) · x̂
template <class T>
void differentiate(const T* grad_y, const T* x, const T* gate, float rstd, T* grad_x, T* grad_gate, float* grad_weight,
                   const RmsNormGatedBackward& args) {
  const float* weight = args.weight;
  const float dot = sum_over(args.hidden, [&](int64_t i, auto lanes) {
    const Gate a = activate(load(gate + i, lanes), args.sigmoid);
    const Vec normalized = load(x + i, lanes) * rstd, gradient = load(grad_y + i, lanes), w = load(weight + i, lanes);
    const Vec share = gradient * a.value * normalized;
    store(grad_weight + i, load(grad_weight + i, lanes) + share, lanes);
    store(grad_gate + i, gradient * w * normalized * a.slope, lanes, args.grad_gate.past_cache);
    return share * w;
  });
  const float mean = dot / args.hidden;
  for_each_vector(args.hidden, [&](int64_t i, auto lanes) {
    const Vec a = activate(load(gate + i, lanes), args.sigmoid).value;
    const Vec g = load(grad_y + i, lanes) * load(weight + i, lanes) * a;
    store(grad_x + i, (g - load(x + i, lanes) * rstd * mean) * rstd, lanes, args.grad_x.past_cache);
  });
}

}  // namespace

void rms_norm_gated_forward_kernel(const RmsNormGatedForward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t r = begin; r < end; ++r)
      args.rstd[r] = normalize(row<T>(args.x, r), row<T>(args.gate, r), row<T>(args.y, r), args);
  });
}

void rms_norm_gated_backward_kernel(const RmsNormGatedBackward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      float* grad_weight = args.partial_weight + chunk * args.hidden;
      for_each_vector(args.hidden, [&](int64_t i, auto lanes) { store(grad_weight + i, Vec{}, lanes); });
      const int64_t first = chunk * args.rows_per_chunk, last = std::min(first + args.rows_per_chunk, args.rows);
      for (int64_t r = first; r < last; ++r)
        differentiate(row<T>(args.grad_y, r), row<T>(args.x, r), row<T>(args.gate, r), args.rstd[r],
                      row<T>(args.grad_x, r), row<T>(args.grad_gate, r), grad_weight, args);
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
