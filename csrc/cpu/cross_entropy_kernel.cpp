#include "cross_entropy.h"

#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

inline float log_of(double x) { return static_cast<float>(__builtin_log(x)); }

// What the softmax sees of the logits x, and its derivative.
template <bool capped>
struct Cap {
  float softcap, inverse;

  Vec value(Vec x) const { return capped ? softcap * tanh(x * inverse) : x; }

  // Of y = value(x).
  Vec slope(Vec y) const {
    const Vec bounded = y * inverse;
    return capped ? 1.0f - bounded * bounded : broadcast(1.0f);
  }

  float value(float x) const { return value(broadcast(x))[0]; }
  float slope(float y) const { return slope(broadcast(y))[0]; }
};

// The sum of term(i, lanes) over a row: float within a block, double over blocks, so that a long row loses nothing.
template <class Term>
double long_sum(int64_t length, Term&& term) {
  constexpr int64_t kBlock = 4096;
  double total = 0;
  for (int64_t first = 0; first < length; first += kBlock)
    total += sum_over(length - first < kBlock ? length - first : kBlock,
                      [&](int64_t i, auto lanes) { return term(first + i, lanes); });
  return total;
}

// v in the lanes that hold elements, `other` in those beyond the row's end.
inline Vec or_else(Vec v, AllLanes, float) { return v; }

inline Vec or_else(Vec v, FirstLanes lanes, float other) {
  for (int64_t lane = lanes.count; lane < kLanes; ++lane) v[lane] = other;
  return v;
}

template <class T, bool capped>
float largest(const T* logits, int64_t length, const Cap<capped>& cap) {
  constexpr float kLowest = -__builtin_inff();
  Vec most = broadcast(kLowest);
  for_each_vector(length,
                  [&](int64_t i, auto lanes) { most = max(most, or_else(load(logits + i, lanes), lanes, kLowest)); });
  float result = kLowest;
  for (int lane = 0; lane < kLanes; ++lane) result = most[lane] > result ? most[lane] : result;
  return cap.value(result);  // it is monotonic
}

// One row; returns its loss.
template <class T, bool capped>
float differentiate(T* logits, int64_t target, const float* weight, const CrossEntropyRows& args) {
  const int64_t length = args.vocabulary;
  const Cap<capped> cap{args.softcap, capped ? 1.0f / args.softcap : 0.0f};
  const auto value = [&](int64_t i, auto lanes) { return cap.value(load(logits + i, lanes)); };

  const float top = largest(logits, length, cap);
  const double exp_sum =
      long_sum(length, [&](int64_t i, auto lanes) { return or_else(exp(value(i, lanes) - top), lanes, 0.0f); });
  const float log_sum = log_of(exp_sum), lse = top + log_sum, hit = cap.value(to_float(logits[target]));
  const float keep = 1.0f - args.smoothing;
  // Differences to the largest first: they are exact where the logits themselves are so large that lse is not.
  float loss = log_sum + keep * (top - hit) + args.z_loss * lse * lse;
  if (args.smoothing > 0) {
    const double total = long_sum(length, [&](int64_t i, auto lanes) { return or_else(value(i, lanes), lanes, 0.0f); });
    loss += args.smoothing * static_cast<float>(top - total / length);
  }
  if (weight == nullptr) return loss;

  // d loss / d y[j] = p[j] (1 + 2 z_loss lse) − smoothing / length − (1 − smoothing) [j is the target]
  const float of_exp = *weight * (1.0f + 2.0f * args.z_loss * lse) / static_cast<float>(exp_sum);
  const float everywhere = *weight * args.smoothing / length;
  const auto gradient = [&](Vec y) { return (exp(y - top) * of_exp - everywhere) * cap.slope(y); };
  const float of_target = gradient(broadcast(hit))[0] - *weight * keep * cap.slope(hit);
  for_each_vector(length, [&](int64_t i, auto lanes) { store(logits + i, gradient(value(i, lanes)), lanes); });
  store(logits + target, broadcast(of_target), FirstLanes{1});
  return loss;
}

template <class T>
void clear(T* logits, int64_t length) {
  for_each_vector(length, [&](int64_t i, auto lanes) { store(logits + i, Vec{}, lanes); });
}

}  // namespace

void cross_entropy_kernel(const CrossEntropyRows& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t r = begin; r < end; ++r) {
      T* logits = static_cast<T*>(args.logits) + r * args.stride;
      const float* weight = args.weight == nullptr ? nullptr : args.weight + r;
      const int64_t target = args.targets[r];
      if (target == args.ignore_index) {
        args.loss[r] = 0.0f;
        if (weight != nullptr) clear(logits, args.vocabulary);
      } else {
        args.loss[r] = args.softcap > 0 ? differentiate<T, true>(logits, target, weight, args)
                                        : differentiate<T, false>(logits, target, weight, args);
      }
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
