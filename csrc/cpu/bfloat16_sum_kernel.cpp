#include "bfloat16_sum.h"

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

using Bits8 = VectorOf<uint8_t, kLanes>::type;

inline Bits32 widen(Bits8 bytes) {
#if defined(__AVX512F__)
  return (Bits32)_mm512_maskz_cvtepu8_epi32(kAll, (__m128i)bytes);
#else
  return __builtin_convertvector(bytes, Bits32);
#endif
}

// The lowest byte of each.
inline Bits8 lowest(Bits32 bits) {
#if defined(__AVX512F__)
  return (Bits8)_mm512_maskz_cvtepi32_epi8(kAll, (__m512i)bits);
#else
  return __builtin_convertvector(bits, Bits8);
#endif
}

template <class Lanes>
Bits32 load_bytes(const uint8_t* p, Lanes lanes) {
  Bits8 bytes = {};
  __builtin_memcpy(&bytes, p, lanes.count);
  return widen(bytes);
}

template <class Lanes>
void store_bytes(uint8_t* p, Bits8 bytes, Lanes lanes) {
  __builtin_memcpy(p, &bytes, lanes.count);
}

}  // namespace

void bfloat16_sum_kernel(const BFloat16Sum& args, int64_t begin, int64_t end) {
  bfloat16* high = args.high + begin;
  uint8_t* low = args.low + begin;
  const bfloat16* addend = args.addend + begin;
  const bool last = args.last;
  for_each_vector(end - begin, [&](int64_t i, auto lanes) {
    // A bfloat16 is the upper half of a float.
    const Vec sum = (Vec)((Bits32)load(high + i, lanes) | load_bytes(low + i, lanes) << 8) + load(addend + i, lanes);
    if (last) return store(high + i, sum, lanes);
    const Bits32 rounded = sum == sum ? (Bits32)sum + 0x80 : (Bits32)sum;
    store(high + i, (Vec)(rounded & 0xffff0000), lanes);
    store_bytes(low + i, lowest(rounded >> 8), lanes);
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
