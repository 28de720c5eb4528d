// Elementary functions on vectors of float.
#pragma once

#include "vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// The smaller and the larger of a and b, b where one of them is NaN.
inline Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(kAll, (__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(kAll, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline Vec sqrt(Vec x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_sqrt_ps(kAll, (__m512)x);
#elif defined(__AVX2__)
  return (Vec)_mm256_sqrt_ps((__m256)x);
#else
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

template <int lanes, int... lane>
float largest_lane(typename VectorOf<float, lanes>::type v, std::integer_sequence<int, lane...>) {
  const auto lower = __builtin_shufflevector(v, v, lane...);
  const auto upper = __builtin_shufflevector(v, v, (lane + lanes / 2)...);
  const auto larger = lower > upper ? lower : upper;
  if constexpr (lanes == 4)
    return larger[0] > larger[1] ? larger[0] : larger[1];
  else
    return largest_lane<lanes / 2>(larger, std::make_integer_sequence<int, lanes / 4>{});
}

// The largest of all lanes, if none is NaN.
inline float largest_lane(Vec v) { return largest_lane<kLanes>(v, std::make_integer_sequence<int, kLanes / 2>{}); }

// 1 / x for x in [1, 2^126], to about one unit in the last place.
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  const Vec estimate = (Vec)_mm512_maskz_rcp14_ps(kAll, (__m512)x);  // 14 bits, then twice as many
  return estimate + estimate * (1.0f - x * estimate);
#else
  return 1.0f / x;
#endif
}

// p · 2^n for integer n <= 128. `shifted` holds n in the lowest bits of its mantissa; outside AVX-512, n > -127.
inline Vec scale_by_power_of_two(Vec p, [[maybe_unused]] Vec n, [[maybe_unused]] Vec shifted) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(kAll, (__m512)p, (__m512)n);
#else
  return p * (Vec)(((Bits32)shifted << 23) + (127u << 23));
#endif
}

constexpr float kExpLowest = -87.33654f;  // below, e^x is subnormal

// x within what exp_in_range takes; NaN stays NaN.
inline Vec clamp_for_exp(Vec x) { return max(broadcast(kExpLowest), min(broadcast(-kExpLowest), x)); }

// e^x to about one unit in the last place for x in [-87.33654, 87.33654], NaN for NaN.
inline Vec exp_in_range(Vec x) {
  // x = n ln 2 + r with integer n and |r| <= ln(2) / 2. Adding 1.5 · 2^23 rounds to an integer, in the lowest bits.
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f;
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // n · kLn2High is exact
  const Vec shifted = x * kLog2E + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * kLn2High) - n * kLn2Low;

  // e^r = 1 + r + r² p(r): p is the minimax polynomial of degree 4 for the relative error, 3e-9.
  Vec p = r * 0.00138145988f + 0.00836871658f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return scale_by_power_of_two(p, n, shifted);
}

// e^x; 0 where that would be subnormal, and no more than e^87.3, the end of float's range.
inline Vec exp(Vec x) { return x < kExpLowest ? Vec{} : exp_in_range(clamp_for_exp(x)); }

// 2^x for x <= 127, to about one unit in the last place; 0 below 2^-126.5, NaN for NaN.
inline Vec exp2(Vec x) {
  constexpr float kLowest = -127.0f;
  constexpr float kRound = 12582912.0f + 127.0f;  // adding 1.5 · 2^23 rounds to an integer, in the lowest bits
  const Vec in_range = max(broadcast(kLowest), x);
  const Vec shifted = in_range + kRound;        // those bits hold the exponent of 2^n, whose bias is 127
  const Vec f = in_range - (shifted - kRound);  // exact, |f| <= 1/2
  const Vec power = (Vec)((Bits32)shifted << 23);

  // 2^f: the minimax polynomial of degree 5 for the relative error, 7e-8.
  Vec p = f * 0.0013276472f + 0.009675541f;
  p = p * f + 0.05550713f;
  p = p * f + 0.2402212f;
  p = p * f + 0.69314694f;
  p = p * f + 1.0f;
  return p * power;
}

// tanh(x) to about two units in the last place.
inline Vec tanh(Vec x) {
  // Near 0 the odd polynomial x p(x²), minimax for the relative error, 2e-9; elsewhere 1 - 2 / (e^2|x| + 1).
  constexpr float kSmall = 0.6f, kSaturated = 9.1f;
  const Vec magnitude = (Vec)((Bits32)x & 0x7fffffff), square = x * x;
  Vec p = square * -0.005659989f + 0.020590989f;
  p = p * square + -0.053721067f;
  p = p * square + 0.13331127f;
  p = p * square + -0.3333326f;
  p = p * square + 1.0f;
  const Vec large = 1.0f - 2.0f * reciprocal(exp_in_range(2.0f * min(broadcast(kSaturated), magnitude)) + 1.0f);
  const Vec signed_large = (Vec)((Bits32)large | ((Bits32)x & 0x80000000));
  return magnitude < kSmall ? x * p : signed_large;
}

// 1 / (1 + e^-x), no less than e^-87.3.
inline Vec sigmoid(Vec x) { return reciprocal(1.0f + exp_in_range(-clamp_for_exp(x))); }

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
