// Elementary functions on vectors of float.
#pragma once

#include "vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// e^x to about one unit in the last place: 0 below -87.3 (subnormal results are flushed), infinity
// above 88.3, NaN for NaN.
inline Vec exp(Vec x) {
  // x = n ln 2 + r with integer n and |r| <= ln(2) / 2. Adding 1.5 * 2^23 leaves the integer in the lowest
  // bits of `shifted`.
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f;
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // n * kLn2High is exact
  const Vec shifted = x * kLog2E + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * kLn2High) - n * kLn2Low;
  // e^r = 1 + r + r^2 p(r): p is the minimax polynomial of degree 4 for the relative error (3e-9, below
  // float's rounding).
  Vec p = r * 0.00138145988f + 0.00836871658f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  const Vec power_of_r = (p * r * r + r) + 1.0f;
  const Vec power_of_two = (Vec)(((Bits32)shifted << 23) + (127u << 23));
  const Vec result = power_of_r * power_of_two;
  const Vec clamped = x > 88.3f ? broadcast(__builtin_inff()) : result;
  return x < -87.3f ? Vec{} : clamped;
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) {
  return 1.0f / (1.0f + exp(-x));
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
