// half and bfloat16_t: stored as 16 bits, computed with as float, rounded to nearest even.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace AscendC {

// CAST_NONE is CAST_RINT where a conversion loses bits; CAST_ROUND takes ties away from zero; CAST_ODD truncates and
// sets the last bit if anything was lost, so that a second rounding cannot go wrong.
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

}  // namespace AscendC

namespace ascend_twin {

// A value in units of the last place to an integer.
inline double round_units(double units, AscendC::RoundMode mode) {
  using AscendC::RoundMode;
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return std::floor(units);
    case RoundMode::CAST_CEIL:
      return std::ceil(units);
    case RoundMode::CAST_ROUND:
      return std::round(units);
    case RoundMode::CAST_TRUNC:
      return std::trunc(units);
    case RoundMode::CAST_ODD: {
      const double whole = std::trunc(units);
      const bool lost = whole != units, even = std::fmod(whole, 2.0) == 0.0;
      return lost && even ? whole + std::copysign(1.0, units) : whole;
    }
    default:
      return std::nearbyint(units);
  }
}

// A binary floating-point format with subnormal numbers, infinities and NaN.
template <int kFractionBits, int kMinExponent, int kMaxExponent>
struct Format {
  // The number of this format that `x` is rounded to, infinity where it is too large.
  static float round(float x, AscendC::RoundMode mode) {
    if (!std::isfinite(x) || x == 0.0f) return x;
    const int exponent = std::max(std::ilogb(x), kMinExponent);
    const double rounded = std::ldexp(round_units(std::ldexp(double(x), kFractionBits - exponent), mode),
                                      exponent - kFractionBits);  // both scalings are exact
    const double largest = std::ldexp(2.0 - std::ldexp(1.0, -kFractionBits), kMaxExponent);
    if (std::fabs(rounded) <= largest) return std::copysign(float(rounded), x);
    const bool towards_zero = mode == AscendC::RoundMode::CAST_TRUNC || mode == AscendC::RoundMode::CAST_ODD ||
                              (mode == AscendC::RoundMode::CAST_FLOOR && x > 0) ||
                              (mode == AscendC::RoundMode::CAST_CEIL && x < 0);
    return std::copysign(towards_zero ? float(largest) : std::numeric_limits<float>::infinity(), x);
  }
};

using HalfFormat = Format<10, -14, 15>;
using Bfloat16Format = Format<7, -126, 127>;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// `x` must be a number of the format.
inline uint16_t encode_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = (bits >> 16) & 0x8000;
  if (std::isnan(x)) return sign | 0x7e00;
  if (std::isinf(x)) return sign | 0x7c00;
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-14f) return sign | uint16_t(magnitude * 0x1p24f);
  return sign | uint16_t(((bits >> 13) & 0x3ffff) - (112 << 10));
}

inline float decode_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, float_of(sign));
  return float_of(sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13);
}

inline uint16_t encode_bfloat16(float x) { return std::isnan(x) ? 0x7fc0 : bits_of(x) >> 16; }

}  // namespace ascend_twin

struct half {
  uint16_t bits = 0;

  half() = default;
  half(float x) : half(x, AscendC::RoundMode::CAST_RINT) {}
  half(float x, AscendC::RoundMode mode) : bits(ascend_twin::encode_half(ascend_twin::HalfFormat::round(x, mode))) {}
  operator float() const { return ascend_twin::decode_half(bits); }
};

struct bfloat16_t {
  uint16_t bits = 0;

  bfloat16_t() = default;
  bfloat16_t(float x) : bfloat16_t(x, AscendC::RoundMode::CAST_RINT) {}
  bfloat16_t(float x, AscendC::RoundMode mode)
      : bits(ascend_twin::encode_bfloat16(ascend_twin::Bfloat16Format::round(x, mode))) {}
  operator float() const { return ascend_twin::float_of(uint32_t(bits) << 16); }
};
