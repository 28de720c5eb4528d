// Vectors of float as wide as the instruction set that this file is compiled for.
//
// `Vec` is a GCC/Clang vector: + - * / and comparisons work elementwise, also against a scalar. What the language does
// not give is here: loads and stores that convert from and to half precision, sums over lanes, and loops over a row.
// Arithmetic is always float32.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "scalar_types.h"

#ifndef MINDSPEED_ISA
#define MINDSPEED_ISA portable
#endif

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <class Element, int lanes>
struct VectorOf {
  typedef Element type __attribute__((vector_size(lanes * sizeof(Element))));
};

using Vec = VectorOf<float, kLanes>::type;
using Bits32 = VectorOf<uint32_t, kLanes>::type;  // the bits of a Vec
using Bits16 = VectorOf<uint16_t, kLanes>::type;  // the bits of kLanes half-precision numbers

// The bits of `value` in every lane. Subtracting 0 is the identity, which the compiler leaves out; adding 0 is not.
inline Vec broadcast(float value) { return value - Vec{}; }

// ---- Which lanes of a vector hold elements of the row: all of them, or the first few at the row's end.

struct AllLanes {
  static constexpr int64_t count = kLanes;
};

struct FirstLanes {
  int64_t count;  // in [1, kLanes)
};

// ---- Conversion between float and the bits of half-precision numbers, rounding to nearest even.

#if defined(__AVX512F__)
constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of uninitialised memory inside the forms without a mask
#endif

inline Bits32 widen(Bits16 bits) {
#if defined(__AVX512F__)
  return (Bits32)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)bits);
#elif defined(__AVX2__)
  return (Bits32)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, Bits32);
#endif
}

inline Bits16 narrow(Bits32 bits) {
#if defined(__AVX512F__)
  return (Bits16)_mm512_maskz_cvtepi32_epi16(kAll, (__m512i)bits);
#else
  return __builtin_convertvector(bits, Bits16);
#endif
}

#if defined(__AVX512F__)
// One permutation that puts each 16 bits into the upper half of 32, instead of widening and shifting.
template <int... lane>
Vec from_bfloat16(Bits16 bits, std::integer_sequence<int, lane...>) {
  const VectorOf<int16_t, 32>::type source = {static_cast<int16_t>(lane / 2)...};
  return (Vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)source, _mm512_castsi256_si512((__m256i)bits));
}

inline Vec from_bits(Bits16 bits, bfloat16) { return from_bfloat16(bits, std::make_integer_sequence<int, 32>{}); }
#else
inline Vec from_bits(Bits16 bits, bfloat16) { return (Vec)(widen(bits) << 16); }
#endif

#if defined(__AVX512BF16__)
inline Bits16 to_bits(Vec v, bfloat16) { return (Bits16)_mm512_cvtneps_pbh((__m512)v); }  // subnormals become 0
#else
inline Bits16 to_bits(Vec v, bfloat16) {
  const Bits32 bits = (Bits32)v;
  const Bits32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits32 quiet_nan = bits | 0x400000;  // rounding could carry a NaN into infinity
  return narrow((v == v ? rounded : quiet_nan) >> 16);
}
#endif

#if defined(__AVX512F__)
inline Vec from_bits(Bits16 bits, float16) { return (Vec)_mm512_maskz_cvtph_ps(kAll, (__m256i)bits); }
inline Bits16 to_bits(Vec v, float16) {
  return (Bits16)_mm512_maskz_cvtps_ph(kAll, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
inline Vec from_bits(Bits16 bits, float16) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
inline Bits16 to_bits(Vec v, float16) {
  return (Bits16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// float16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; float32: 1, 8 (bias 127), 23.
inline Vec from_bits(Bits16 half, float16) {
  const Bits32 bits = widen(half);
  const Bits32 magnitude = (bits & 0x7fff) << 13;
  // Multiplying by 2^(127 - 15) moves the exponent to its new bias, and makes subnormal numbers normal on the way.
  const Bits32 finite = (Bits32)((Vec)magnitude * 0x1p112f);
  const Bits32 special = magnitude | 0x7f800000;  // infinity and NaN
  const Bits32 sign = (bits & 0x8000) << 16;
  return (Vec)((magnitude >= 0x0f800000 ? special : finite) | sign);
}

inline Bits16 to_bits(Vec v, float16) {
  const Bits32 sign = (Bits32)v & 0x80000000;
  const Bits32 magnitude = (Bits32)v ^ sign;
  const Bits32 normal = (magnitude + (0xc8000fff + ((magnitude >> 13) & 1))) >> 13;  // rebias, round to even, shift
  // Below 2^-14 float addition rounds at the right place: the last bit of 0.5 is worth 2^-24, float16's smallest
  // number.
  const Bits32 subnormal = (Bits32)((Vec)magnitude + 0.5f) - 0x3f000000;
  const Bits32 special = (magnitude > 0x7f800000 ? Bits32{} + 0x7e00 : Bits32{} + 0x7c00);
  const Bits32 half = magnitude < 0x38800000 ? subnormal : (magnitude >= 0x47800000 ? special : normal);
  return narrow(half | (sign >> 16));
}
#endif

inline Vec from_bits(Vec v, float) { return v; }
inline Vec to_bits(Vec v, float) { return v; }

// The built-in type whose vectors hold the bits of vectors of T.
template <class T>
using BitsOf = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;

template <class T>
float to_float(T element) {
  typename VectorOf<BitsOf<T>, kLanes>::type bits = {};
  __builtin_memcpy(&bits, &element, sizeof element);
  return from_bits(bits, T{})[0];
}

// The value of `v` after a round trip through T.
template <class T>
Vec round_to(Vec v) {
  return from_bits(to_bits(v, T{}), T{});
}

// ---- Loads and stores. Lanes beyond the row's end load as 0 and are not stored.

template <class T>
Vec load(const T* p, AllLanes) {
  typename VectorOf<BitsOf<T>, kLanes>::type bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return from_bits(bits, T{});
}

template <class T>
void store(T* p, Vec v, AllLanes) {
  const auto bits = to_bits(v, T{});
  __builtin_memcpy(p, &bits, sizeof bits);
}

#if defined(__AVX512F__)
inline __mmask16 mask_of(FirstLanes lanes) { return static_cast<__mmask16>((1u << lanes.count) - 1); }

inline Vec load(const float* p, FirstLanes lanes) { return (Vec)_mm512_maskz_loadu_ps(mask_of(lanes), p); }

template <class Half>
Vec load(const Half* p, FirstLanes lanes) {
  return from_bits((Bits16)_mm256_maskz_loadu_epi16(mask_of(lanes), p), Half{});
}

inline void store(float* p, Vec v, FirstLanes lanes) { _mm512_mask_storeu_ps(p, mask_of(lanes), (__m512)v); }

template <class Half>
void store(Half* p, Vec v, FirstLanes lanes) {
  _mm256_mask_storeu_epi16(p, mask_of(lanes), (__m256i)to_bits(v, Half{}));
}
#else
template <class T>
Vec load(const T* p, FirstLanes lanes) {
  T elements[kLanes] = {};
  __builtin_memcpy(elements, p, lanes.count * sizeof(T));
  return load(elements, AllLanes{});
}

template <class T>
void store(T* p, Vec v, FirstLanes lanes) {
  T elements[kLanes];
  store(elements, v, AllLanes{});
  __builtin_memcpy(p, elements, lanes.count * sizeof(T));
}
#endif

// A store that may go past the cache; then p must be aligned to the size of what is stored.
template <class T>
void store(T* p, Vec v, AllLanes lanes, [[maybe_unused]] bool past_cache) {
#if defined(__AVX2__)
  if (past_cache) {
    const auto bits = to_bits(v, T{});
    if constexpr (sizeof bits == 64) _mm512_stream_ps(reinterpret_cast<float*>(p), (__m512)bits);
    if constexpr (sizeof bits == 32) _mm256_stream_ps(reinterpret_cast<float*>(p), (__m256)bits);
    if constexpr (sizeof bits == 16) _mm_stream_ps(reinterpret_cast<float*>(p), (__m128)bits);
    return;
  }
#endif
  store(p, v, lanes);
}

template <class T>
void store(T* p, Vec v, FirstLanes lanes, bool) {
  store(p, v, lanes);
}

// Has memory bring the cache line `bytes` beyond p into the second-level cache, without waiting for it. For streams
// that the processor does not foresee: rows in any order, or of several tensors in turn. No address is wrong.
inline void prefetch(const void* p, int64_t bytes = 0) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + bytes), /*write=*/0, /*level=*/2);
}

// ---- Across lanes.

template <int lanes, int... lane>
float sum_lanes(typename VectorOf<float, lanes>::type v, std::integer_sequence<int, lane...>) {
  if constexpr (lanes == 4) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  } else {
    const auto lower = __builtin_shufflevector(v, v, lane...);
    const auto upper = __builtin_shufflevector(v, v, (lane + lanes / 2)...);
    return sum_lanes<lanes / 2>(lower + upper, std::make_integer_sequence<int, lanes / 4>{});
  }
}

// The sum of all lanes.
inline float sum(Vec v) { return sum_lanes<kLanes>(v, std::make_integer_sequence<int, kLanes / 2>{}); }

// ---- Loops over the elements of a row.

// Calls body(i, lanes) for i = 0, kLanes, 2 kLanes, ...; `lanes` says which of the elements from i on are in [0,
// length).
template <class Body>
void for_each_vector(int64_t length, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) body(i, AllLanes{});
  if (i < length) body(i, FirstLanes{length - i});
}

// The sum over a row of term(i, lanes), which must be 0 in lanes beyond the row's end, as a product of loads is.
template <class Term>
float sum_over(int64_t length, Term&& term) {
  constexpr int kChains = 4;  // independent additions in flight hide each other's latency
  Vec partial[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= length; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) partial[chain] += term(i + chain * kLanes, AllLanes{});
  for (; i + kLanes <= length; i += kLanes) partial[0] += term(i, AllLanes{});
  if (i < length) partial[1] += term(i, FirstLanes{length - i});
  return sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

// ---- Rows and their element types, chosen at run time.

// The row's first element, or nullptr if there are no rows.
template <class T>
const T* row(InputRows rows, int64_t index) {
  return rows.data == nullptr ? nullptr : static_cast<const T*>(rows.data) + index * rows.stride;
}

template <class T>
T* row(OutputRows rows, int64_t index) {
  return rows.data == nullptr ? nullptr : static_cast<T*>(rows.data) + index * rows.stride;
}

// Calls body(T{}) with the element type that `type` names.
template <class Body>
void with_type(DType type, Body&& body) {
  switch (type) {
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(bfloat16{});
    case DType::kFloat16:
      return body(float16{});
  }
}

// Calls body(In{}, Out{}) for an input and an output type: the same, or float32 out of half precision.
template <class Body>
void with_types(DType in, DType out, Body&& body) {
  with_type(in, [&](auto element) { out == in ? body(element, element) : body(element, float{}); });
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
