// Element-wise instructions of the vector pipe, in their two forms: the first `count` elements, or `repeatTime` repeats
// of 8 blocks in which a mask chooses the elements. Arithmetic rounds to the tensors' type.
#pragma once

#include "data_copy.h"

namespace ascend_twin {

template <class T, class... Allowed>
constexpr bool is_one_of() {
  return (std::is_same_v<T, Allowed> || ...);
}

// What arithmetic is done with: integers wrap around, which signed ones of C++ must not.
template <class T>
constexpr auto wrapping(T x) {
  if constexpr (std::is_integral_v<T>) {
    return uint32_t(x);
  } else {
    return x;
  }
}

// The elements of a repeat that take part.
class Mask {
 public:
  template <class T>
  static Mask first(uint64_t count, const Instruction& op) {
    op.require(count > 0 && count <= kRepeatBytes / sizeof(T), "a mask of ", count, " elements is not within 1 to ",
               kRepeatBytes / sizeof(T));
    Mask mask;
    for (uint64_t i = 0; i < count; ++i) mask.bits_[i / 64] |= uint64_t(1) << i % 64;
    return mask;
  }

  static Mask of_bits(const uint64_t bits[2]) {
    Mask mask;
    mask.bits_[0] = bits[0], mask.bits_[1] = bits[1];
    return mask;
  }

  bool has(int element) const { return bits_[element / 64] >> element % 64 & 1; }

  // The elements of a block that take part: from the first one, and how many until the last one.
  std::pair<int, int> within(int block, int block_elements) const {
    int first = 0, end = 0;
    for (int i = block_elements; i-- > 0;) {
      if (!has(block * block_elements + i)) continue;
      first = i;
      if (end == 0) end = i + 1;
    }
    return {first, end - first};
  }

 private:
  uint64_t bits_[2] = {};
};

// An operand of an instruction in repeats: distances in blocks.
template <class T>
struct Strided {
  const char* name;
  const AscendC::LocalTensor<T>& tensor;
  uint32_t block_stride, repeat_stride;

  uint64_t first_of(int repeat, int block) const {
    return (uint64_t(repeat) * repeat_stride + uint64_t(block) * block_stride) * kBlockElements<T>;
  }
};

// Operands of an instruction may be the same memory, but not parts of each other.
template <class D, class S>
void require_no_overlap(const Instruction& op, const D* dst, const S* src, int64_t count) {
  const auto *out = reinterpret_cast<const uint8_t*>(dst), *in = reinterpret_cast<const uint8_t*>(src);
  const int64_t out_bytes = count * sizeof(D), in_bytes = count * sizeof(S);
  op.require(in == out || in >= out + out_bytes || out >= in + in_bytes, "dst and a source overlap in part");
}

// dst = f(src...) for the elements that the mask chooses, in all repeats.
template <class D, class F, class... S>
void for_each_masked(const Instruction& op, const Mask& mask, int repeats, F f, const Strided<D>& dst,
                     const Strided<S>&... src) {
  static_assert(((sizeof(S) == sizeof(D)) && ...), "operands of one size");
  constexpr int kElements = kBlockElements<D>;
  op.require(dst.block_stride > 0, "dst has a block stride of 0");
  op.require(dst.repeat_stride > 0 || repeats < 2, "dst has a repeat stride of 0: repeats would overlap");
  for (int repeat = 0; repeat < repeats; ++repeat) {
    op.count_vector_work(kRepeatBytes);
    for (int block = 0; block < 8; ++block) {
      const auto [first, count] = mask.within(block, kElements);
      if (count == 0) continue;
      const std::tuple<const S*...> in(op.read(src.name, src.tensor, src.first_of(repeat, block) + first, count)...);
      D* out = op.write(dst.name, dst.tensor, dst.first_of(repeat, block) + first, count);
      std::apply([&](const S*... pointers) { (require_no_overlap(op, out, pointers, count), ...); }, in);
      for (int i = 0; i < count; ++i) {
        if (!mask.has(block * kElements + first + i)) continue;
        std::apply([&](const S*... pointers) { out[i] = f(pointers[i]...); }, in);
      }
    }
  }
}

template <class D, class F, class... S>
void for_each_of(const Instruction& op, int64_t count, F f, const AscendC::LocalTensor<D>& dst,
                 const AscendC::LocalTensor<S>&... src) {
  op.require(count >= 0, "a count of ", count);
  op.count_vector_work(count * std::max({sizeof(D), sizeof(S)...}));
  const std::tuple<const S*...> in(op.read("a source", src, 0, count)...);
  D* out = op.write("dst", dst, 0, count);
  std::apply([&](const S*... pointers) { (require_no_overlap(op, out, pointers, count), ...); }, in);
  for (int64_t i = 0; i < count; ++i) {
    std::apply([&](const S*... pointers) { out[i] = f(pointers[i]...); }, in);
  }
}

}  // namespace ascend_twin

namespace AscendC {

// dst = src0 ∘ src1. EXPRESSION is of x and y, the types are those that dav-2201 has.
#define ASCEND_TWIN_BINARY(NAME, EXPRESSION, ...)                                                                    \
  template <class T>                                                                                                 \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count, \
            ascend_twin::Site site = ascend_twin::Site::here()) {                                                    \
    static_assert(ascend_twin::is_one_of<T, __VA_ARGS__>(), #NAME " does not have this type");                       \
    const ascend_twin::Instruction op(#NAME, PIPE_V, site);                                                          \
    ascend_twin::for_each_of(op, count, [](T x, T y) { return T(EXPRESSION); }, dst, src0, src1);                    \
  }                                                                                                                  \
  template <class T>                                                                                                 \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,        \
            const uint8_t repeatTime, const BinaryRepeatParams& params,                                              \
            ascend_twin::Site site = ascend_twin::Site::here()) {                                                    \
    static_assert(ascend_twin::is_one_of<T, __VA_ARGS__>(), #NAME " does not have this type");                       \
    const ascend_twin::Instruction op(#NAME, PIPE_V, site);                                                          \
    ascend_twin::for_each_masked(                                                                                    \
        op, ascend_twin::Mask::first<T>(mask, op), repeatTime, [](T x, T y) { return T(EXPRESSION); },               \
        ascend_twin::Strided<T>{"dst", dst, params.dstBlkStride, params.dstRepStride},                               \
        ascend_twin::Strided<T>{"src0", src0, params.src0BlkStride, params.src0RepStride},                           \
        ascend_twin::Strided<T>{"src1", src1, params.src1BlkStride, params.src1RepStride});                          \
  }

ASCEND_TWIN_BINARY(Add, ascend_twin::wrapping(x) + ascend_twin::wrapping(y), half, float, int16_t, int32_t)
ASCEND_TWIN_BINARY(Sub, ascend_twin::wrapping(x) - ascend_twin::wrapping(y), half, float, int16_t, int32_t)
ASCEND_TWIN_BINARY(Mul, ascend_twin::wrapping(x) * ascend_twin::wrapping(y), half, float, int16_t, int32_t)
ASCEND_TWIN_BINARY(Div, x / y, half, float)
ASCEND_TWIN_BINARY(Max, x > y ? x : y, half, float, int16_t, int32_t)
ASCEND_TWIN_BINARY(Min, x < y ? x : y, half, float, int16_t, int32_t)
#undef ASCEND_TWIN_BINARY

// dst = src ∘ scalar, of x and y.
#define ASCEND_TWIN_SCALAR(NAME, EXPRESSION)                                                                     \
  template <class T>                                                                                             \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count,         \
            ascend_twin::Site site = ascend_twin::Site::here()) {                                                \
    static_assert(ascend_twin::is_one_of<T, half, float, int16_t, int32_t>(), #NAME " does not have this type"); \
    const ascend_twin::Instruction op(#NAME, PIPE_V, site);                                                      \
    ascend_twin::for_each_of(op, count, [y = scalar](T x) { return T(EXPRESSION); }, dst, src);                  \
  }                                                                                                              \
  template <class T>                                                                                             \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, uint64_t mask,                \
            const uint8_t repeatTime, const UnaryRepeatParams& params,                                           \
            ascend_twin::Site site = ascend_twin::Site::here()) {                                                \
    static_assert(ascend_twin::is_one_of<T, half, float, int16_t, int32_t>(), #NAME " does not have this type"); \
    const ascend_twin::Instruction op(#NAME, PIPE_V, site);                                                      \
    ascend_twin::for_each_masked(                                                                                \
        op, ascend_twin::Mask::first<T>(mask, op), repeatTime, [y = scalar](T x) { return T(EXPRESSION); },      \
        ascend_twin::Strided<T>{"dst", dst, params.dstBlkStride, params.dstRepStride},                           \
        ascend_twin::Strided<T>{"src", src, params.srcBlkStride, params.srcRepStride});                          \
  }

ASCEND_TWIN_SCALAR(Adds, ascend_twin::wrapping(x) + ascend_twin::wrapping(y))
ASCEND_TWIN_SCALAR(Muls, ascend_twin::wrapping(x) * ascend_twin::wrapping(y))
ASCEND_TWIN_SCALAR(Maxs, x > y ? x : y)
ASCEND_TWIN_SCALAR(Mins, x < y ? x : y)
#undef ASCEND_TWIN_SCALAR

// dst = f(src), of x.
#define ASCEND_TWIN_UNARY(NAME, EXPRESSION)                                                    \
  template <class T>                                                                           \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count,        \
            ascend_twin::Site site = ascend_twin::Site::here()) {                              \
    static_assert(ascend_twin::is_one_of<T, half, float>(), #NAME " does not have this type"); \
    const ascend_twin::Instruction op(#NAME, PIPE_V, site);                                    \
    ascend_twin::for_each_of(op, count, [](float x) { return T(EXPRESSION); }, dst, src);      \
  }

ASCEND_TWIN_UNARY(Exp, std::exp(x))
ASCEND_TWIN_UNARY(Ln, std::log(x))
ASCEND_TWIN_UNARY(Sqrt, std::sqrt(x))
ASCEND_TWIN_UNARY(Abs, std::fabs(x))
#undef ASCEND_TWIN_UNARY

// dst += src · scalar
template <class T, class U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalar, const int32_t& count,
          ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(std::is_same_v<T, U> && ascend_twin::is_one_of<T, half, float>(), "Axpy of one type, half or float");
  const ascend_twin::Instruction op("Axpy", PIPE_V, site);
  ascend_twin::for_each_of(op, count, [scalar](T x, T sum) { return T(sum + x * scalar); }, dst, src, dst);
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count,
               ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("Duplicate", PIPE_V, site);
  ascend_twin::for_each_of(op, count, [value] { return value; }, dst);
}

// The mask has a bit for each element of a repeat.
template <class T>
void Duplicate(const LocalTensor<T>& dst, const T& value, uint64_t mask[], const uint8_t repeatTime,
               const uint16_t dstBlockStride, const uint8_t dstRepeatStride,
               ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("Duplicate", PIPE_V, site);
  ascend_twin::for_each_masked(
      op, ascend_twin::Mask::of_bits(mask), repeatTime, [value] { return value; },
      ascend_twin::Strided<T>{"dst", dst, dstBlockStride, dstRepeatStride});
}

}  // namespace AscendC
