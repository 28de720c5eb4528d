// Broadcasts, gathers, comparisons and selections of the vector pipe.
#pragma once

#include "vector_reduce.h"

namespace AscendC {

// Each of 8 elements per repeat fills a block of 32 bytes.
template <class T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t repeatTime,
          const BrcbRepeatParams& params, ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb does not have this type");
  constexpr uint32_t kElements = ascend_twin::kBlockElements<T>;
  const ascend_twin::Instruction op("Brcb", PIPE_V, site);
  op.require(params.dstBlkStride > 0, "dst has a block stride of 0");
  const T* in = op.read("src", src, 0, 8 * repeatTime);
  for (uint64_t repeat = 0; repeat < repeatTime; ++repeat) {
    op.count_vector_work(ascend_twin::kRepeatBytes);
    for (uint64_t block = 0; block < 8; ++block) {
      const uint64_t at = repeat * params.dstRepStride + block * params.dstBlkStride;
      std::fill_n(op.write("dst", dst, at * kElements, kElements), kElements, in[repeat * 8 + block]);
    }
  }
}

// dst[i] = the element `base + offsets[i]` bytes into src.
template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offsets,
            const uint32_t base, const uint32_t count, ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather does not have this type");
  const ascend_twin::Instruction op("Gather", PIPE_V, site);
  op.count_vector_work(uint64_t(count) * sizeof(uint32_t));
  const uint32_t* offset = op.read("offsets", offsets, 0, count);
  std::vector<T> gathered(count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t from = uint64_t(base) + offset[i];
    op.require(from % sizeof(T) == 0, "offset ", from, " is not that of an element of ", sizeof(T), " bytes");
    gathered[i] = *op.read("src", src, from / sizeof(T), 1);
  }
  op.require(!op.same_start(dst, src), "dst must not be src");
  T* out = op.write("dst", dst, 0, count);
  std::copy_n(gathered.data(), count, out);
}

// Bit i of dst = whether src[i] compares to the scalar. The elements have to fill whole repeats.
template <class D, class T>
void CompareScalar(const LocalTensor<D>& dst, const LocalTensor<T>& src, const T scalar, CMPMODE mode, uint32_t count,
                   ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(std::is_same_v<D, uint8_t> && ascend_twin::is_one_of<T, half, float>(), "CompareScalar: wrong types");
  const ascend_twin::Instruction op("CompareScalar", PIPE_V, site);
  op.require(count * sizeof(T) % ascend_twin::kRepeatBytes == 0, count, " elements are not whole repeats of ",
             ascend_twin::kRepeatBytes, " bytes");
  op.count_vector_work(uint64_t(count) * sizeof(T));
  const T* in = op.read("src", src, 0, count);
  uint8_t* out = op.write("dst", dst, 0, count / 8);
  if (count > 0) std::fill_n(out, count / 8, 0);
  for (uint32_t i = 0; i < count; ++i) {
    const float x = in[i], y = scalar;
    const bool results[] = {x<y, x> y, x == y, x <= y, x >= y, x != y};
    out[i / 8] |= results[int(mode)] << i % 8;
  }
}

// dst[i] = bit i of the selection ? src[i] : the scalar. Temporaries take the end of UB, which must be free.
template <class T, class U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selection, const LocalTensor<T>& src, T scalar,
            SELMODE mode, uint32_t count, ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(ascend_twin::is_one_of<T, half, float>() && std::is_same_v<U, uint8_t>, "Select: wrong types");
  const ascend_twin::Instruction op("Select", PIPE_V, site);
  op.require(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE, "this form is that of VSEL_TENSOR_SCALAR_MODE");
  const uint32_t used = ascend_twin::core().used[ascend_twin::kUnifiedBuffer];
  const uint32_t usable =
      ascend_twin::kMemoryFacts[ascend_twin::kUnifiedBuffer].bytes - ascend_twin::kSelectReservedBytes;
  op.require(used <= usable, "Select needs the last ", ascend_twin::kSelectReservedBytes, " bytes of UB, but ", used,
             " are taken");
  op.count_vector_work(uint64_t(count) * sizeof(T));
  const U* bits = op.read("selection", selection, 0, (count + 7) / 8);
  const T* in = op.read("src", src, 0, count);
  T* out = op.write("dst", dst, 0, count);
  for (uint32_t i = 0; i < count; ++i) out[i] = bits[i / 8] >> i % 8 & 1 ? in[i] : scalar;
}

}  // namespace AscendC
