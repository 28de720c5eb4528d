// Sums and maxima of the vector pipe.
#pragma once

#include "vector_convert.h"

namespace ascend_twin {

// The hardware adds the elements of a repeat pairwise: ((x0 + x1) + (x2 + x3)) + … with zeros where the mask is off.
template <class T>
T pairwise_sum(T* values, int count) {
  for (; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) values[i] = T(values[2 * i] + values[2 * i + 1]);
  }
  return values[0];
}

template <class T>
T sum_of_repeat(const T* values, int64_t count) {
  constexpr int kElements = kRepeatBytes / sizeof(T);
  T padded[kElements];
  std::fill(std::copy_n(values, std::min<int64_t>(count, kElements), padded), padded + kElements, T(0.0f));
  return pairwise_sum(padded, kElements);
}

}  // namespace ascend_twin

namespace AscendC {

// dst[0] = the sum of `count` elements: pairwise within a repeat, repeats in order. dst needs the alignment of one
// element only. The buffer for temporaries is not used in this form, but has to be given.
template <class T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& temporaries,
               const int32_t count, ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(ascend_twin::is_one_of<T, half, float>(), "ReduceSum does not have this type");
  constexpr int kElements = ascend_twin::kRepeatBytes / sizeof(T);
  const ascend_twin::Instruction op("ReduceSum", PIPE_V, site);
  op.require(temporaries.GetSize() > 0, "no buffer for temporaries");
  if (count <= 0) return;
  op.count_vector_work(count * sizeof(T));
  const T* in = op.read("src", src, 0, count);
  T sum = ascend_twin::sum_of_repeat(in, count);
  for (int64_t i = kElements; i < count; i += kElements) sum = T(sum + ascend_twin::sum_of_repeat(in + i, count - i));
  *op.write("dst", dst, 0, 1, sizeof(T)) = sum;
}

// dst[0] = the maximum of `count` elements. The index that the interface can give as well is not in the twin.
template <class T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& temporaries,
               const int32_t count, ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(ascend_twin::is_one_of<T, half, float>(), "ReduceMax does not have this type");
  const ascend_twin::Instruction op("ReduceMax", PIPE_V, site);
  if (count <= 0) return;
  op.count_vector_work(count * sizeof(T));
  // One value of each repeat, in whole blocks.
  const uint64_t repeats = (count * sizeof(T) + ascend_twin::kRepeatBytes - 1) / ascend_twin::kRepeatBytes;
  op.write("temporaries", temporaries, 0, ascend_twin::round_up(repeats, ascend_twin::kBlockElements<T>));
  const T* in = op.read("src", src, 0, count);
  *op.write("dst", dst, 0, 1, sizeof(T)) = *std::max_element(in, in + count);
}

// dst[repeat · dstRepStride] = the sum of a repeat's first `mask` elements, for up to 255 repeats.
template <class T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeatTime,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(ascend_twin::is_one_of<T, half, float>(), "WholeReduceSum does not have this type");
  constexpr int kElements = ascend_twin::kRepeatBytes / sizeof(T), kInBlock = ascend_twin::kBlockElements<T>;
  const ascend_twin::Instruction op("WholeReduceSum", PIPE_V, site);
  op.require(repeatTime >= 0 && repeatTime <= 255, "at most 255 repeats, not ", repeatTime);
  op.require(mask > 0 && mask <= kElements, "a mask of ", mask, " elements is not within 1 to ", kElements);
  const ascend_twin::Strided<T> in{"src", src, uint32_t(srcBlkStride), uint32_t(srcRepStride)};
  for (int repeat = 0; repeat < repeatTime; ++repeat) {
    op.count_vector_work(ascend_twin::kRepeatBytes);
    T values[kElements] = {};
    for (int first = 0; first < mask; first += kInBlock) {
      const int count = std::min(kInBlock, mask - first);
      std::copy_n(op.read(in.name, src, in.first_of(repeat, first / kInBlock), count), count, values + first);
    }
    *op.write("dst", dst, uint64_t(repeat) * dstRepStride, 1, sizeof(T)) = ascend_twin::sum_of_repeat(values, mask);
  }
}

}  // namespace AscendC
