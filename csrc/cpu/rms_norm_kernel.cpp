#include "rms_norm.h"

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

template <class X>
void add(const X* a, const X* b, X* sum, int64_t length) {
  for_each_vector(length,
                  [&](int64_t i, auto lanes) { store(sum + i, load(a + i, lanes) + load(b + i, lanes), lanes); });
}

// One row; returns rstd.
template <class X, class Y>
float normalize(const X* x, Y* y, const RmsNormForward& args) {
  const int64_t hidden = args.hidden;
  const float* weight = args.weight;
  const bool round = args.round_before_weight, past_cache = args.y.past_cache;

  const float square_sum = sum_over(hidden, [&](int64_t i, auto lanes) {
    const Vec v = load(x + i, lanes);
    return v * v;
  });
  const float rstd = 1.0f / __builtin_sqrtf(square_sum / hidden + args.eps);
  for_each_vector(hidden, [&](int64_t i, auto lanes) {
    Vec normalized = load(x + i, lanes) * rstd;
    if (round) normalized = round_to<X>(normalized);
    store(y + i, normalized * load(weight + i, lanes), lanes, past_cache);
  });
  return rstd;
}

// One row. With g = grad_y · weight:
//   grad_x = rstd · (g − x̂ · mean(g · x̂)) + grad_sum        grad_weight += grad_y · x̂
template <class X, class Y>
void differentiate(const X* x, float rstd, const Y* grad_y, const X* grad_sum, X* grad_x, float* grad_weight,
                   const RmsNormBackward& args) {
  const int64_t hidden = args.hidden;
  const float* weight = args.weight;
  const bool round = args.round_before_weight, past_cache = args.grad_x.past_cache;

  const float dot = sum_over(hidden, [&](int64_t i, auto lanes) {
    const Vec normalized = load(x + i, lanes) * rstd;
    const Vec gradient = load(grad_y + i, lanes);
    if (grad_weight != nullptr) {
      const Vec factor = round ? round_to<X>(normalized) : normalized;
      store(grad_weight + i, load(grad_weight + i, lanes) + gradient * factor, lanes);
    }
    return gradient * load(weight + i, lanes) * normalized;
  });
  const float mean = dot / hidden;
  for_each_vector(hidden, [&](int64_t i, auto lanes) {
    const Vec normalized = load(x + i, lanes) * rstd;
    const Vec g = load(grad_y + i, lanes) * load(weight + i, lanes);
    Vec gradient = (g - normalized * mean) * rstd;
    if (grad_sum != nullptr) gradient += load(grad_sum + i, lanes);
    store(grad_x + i, gradient, lanes, past_cache);
  });
}

}  // namespace

void rms_norm_forward_kernel(const RmsNormForward& args, int64_t begin, int64_t end) {
  with_types(args.x_type, args.y_type, [&](auto x_element, auto y_element) {
    using X = decltype(x_element);
    using Y = decltype(y_element);
    for (int64_t r = begin; r < end; ++r) {
      const X* x = row<X>(args.x, r);
      if (args.residual.data != nullptr) {
        X* sum = row<X>(args.sum, r);
        add(x, row<X>(args.residual, r), sum, args.hidden);
        x = sum;
      }
      args.rstd[r] = normalize(x, row<Y>(args.y, r), args);
    }
  });
}

void rms_norm_backward_kernel(const RmsNormBackward& args, int64_t begin, int64_t end) {
  with_types(args.x_type, args.y_type, [&](auto x_element, auto y_element) {
    using X = decltype(x_element);
    using Y = decltype(y_element);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      float* grad_weight = nullptr;
      if (args.partial_weight != nullptr) {
        grad_weight = args.partial_weight + chunk * args.hidden;
        for_each_vector(args.hidden, [&](int64_t i, auto lanes) { store(grad_weight + i, Vec{}, lanes); });
      }
      const int64_t first = chunk * args.rows_per_chunk;
      const int64_t last = first + args.rows_per_chunk < args.rows ? first + args.rows_per_chunk : args.rows;
      for (int64_t r = first; r < last; ++r)
        differentiate(row<X>(args.x, r), args.rstd[r], row<Y>(args.grad_y, r), row<X>(args.grad_sum, r),
                      row<X>(args.grad_x, r), grad_weight, args);
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
