// Cast: conversions between types, with the rounding modes that dav-2201 has for each pair.
#pragma once

#include "vector.h"

namespace ascend_twin {

// The rounding modes of the conversion from S to D; CAST_ODD belongs to float to half alone.
template <class D, class S>
bool has_rounding(AscendC::RoundMode mode) {
  using AscendC::RoundMode;
  const bool none = mode == RoundMode::CAST_NONE, odd = mode == RoundMode::CAST_ODD;
  if constexpr ((is_one_of<S, half, bfloat16_t>() && std::is_same_v<D, float>) ||
                (std::is_same_v<S, int16_t> && std::is_same_v<D, float>)) {
    return none;  // nothing is lost
  } else if constexpr (std::is_same_v<S, float> && std::is_same_v<D, half>) {
    return true;
  } else if constexpr (std::is_same_v<S, int32_t> && std::is_same_v<D, float>) {
    return !odd;
  } else {
    static_assert((std::is_same_v<S, float> && is_one_of<D, bfloat16_t, float, int16_t, int32_t>()) ||
                      (is_one_of<S, half, bfloat16_t>() && std::is_same_v<D, int32_t>),
                  "Cast does not have this pair of types");
    return !none && !odd;
  }
}

template <class D, class S>
D convert(S x, AscendC::RoundMode mode) {
  if constexpr (is_one_of<D, half, bfloat16_t>()) {
    return D(float(x), mode);
  } else if constexpr (std::is_integral_v<D>) {  // saturates
    const double rounded = round_units(double(float(x)), mode);
    if (std::isnan(rounded)) return 0;
    return D(std::clamp(rounded, double(std::numeric_limits<D>::min()), double(std::numeric_limits<D>::max())));
  } else if constexpr (std::is_same_v<S, float>) {
    return float(round_units(x, mode));
  } else if constexpr (std::is_same_v<S, int32_t>) {
    const int exponent = x == 0 ? 0 : std::max(0, std::ilogb(double(x)) - 23);  // float has 24 bits
    return float(std::ldexp(round_units(std::ldexp(double(x), -exponent), mode), exponent));
  } else {
    return float(x);
  }
}

}  // namespace ascend_twin

namespace AscendC {

template <class D, class S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, const uint32_t count,
          ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("Cast", PIPE_V, site);
  op.require(ascend_twin::has_rounding<D, S>(mode), "rounding mode ", int(mode), " does not exist between these types");
  ascend_twin::for_each_of(op, count, [mode](S x) { return ascend_twin::convert<D>(x, mode); }, dst, src);
}

}  // namespace AscendC
