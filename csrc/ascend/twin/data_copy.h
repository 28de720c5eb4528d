// Copies between global and local memory.
#pragma once

#include "sync.h"

namespace ascend_twin {

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class T>
constexpr uint32_t kBlockElements = kBlockBytes / sizeof(T);

}  // namespace ascend_twin

namespace AscendC {

// Rows of whole blocks, from global memory.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
              ascend_twin::Site site = ascend_twin::Site::here()) {
  constexpr uint32_t kElements = ascend_twin::kBlockElements<T>;
  const ascend_twin::Instruction op("DataCopy", PIPE_MTE2, site);
  const uint64_t length = uint64_t(params.blockLen) * kElements;
  for (uint64_t row = 0; row < params.blockCount; ++row) {
    const T* in = op.read("src", src, row * (length + params.srcStride * kElements), length);
    T* out = op.write("dst", dst, row * (length + params.dstStride * kElements), length);
    std::copy_n(in, length, out);
  }
}

// Rows of whole blocks, to global memory.
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              ascend_twin::Site site = ascend_twin::Site::here()) {
  constexpr uint32_t kElements = ascend_twin::kBlockElements<T>;
  const ascend_twin::Instruction op("DataCopy", PIPE_MTE3, site);
  const uint64_t length = uint64_t(params.blockLen) * kElements;
  for (uint64_t row = 0; row < params.blockCount; ++row) {
    const T* in = op.read("src", src, row * (length + params.srcStride * kElements), length);
    op.store("dst", dst, row * (length + params.dstStride * kElements), in, length);
  }
}

// `count` elements that are whole blocks, either way.
template <class To, class From>
auto DataCopy(const To& dst, const From& src, uint32_t count, ascend_twin::Site site = ascend_twin::Site::here())
    -> decltype(DataCopy(dst, src, DataCopyParams(), site)) {
  constexpr uint32_t kElements = ascend_twin::kBlockElements<std::decay_t<decltype(dst.GetValue(0))>>;
  if (count % kElements != 0) {
    ascend_twin::fail(ascend_twin::text("DataCopy (", site.text(), "): ", count,
                                        " elements are not whole blocks of 32 bytes, which takes DataCopyPad"));
  }
  DataCopy(dst, src, DataCopyParams(1, count / kElements, 0, 0), site);
}

// Rows of any length, from global memory. Each is filled up to whole blocks: with the padding value if there is one,
// with the row's first element if there is no padding at all, and with anything otherwise.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& padding, ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("DataCopyPad", PIPE_MTE2, site);
  op.require(params.blockCount <= 4095 && params.blockLen < (1 << 21), "at most 4095 rows of 2097151 bytes, not ",
             params.blockCount, " of ", params.blockLen);
  op.require(params.blockLen % sizeof(T) == 0 && params.srcStride % sizeof(T) == 0, "rows of ", params.blockLen,
             " bytes with gaps of ", params.srcStride, " bytes are not whole elements");
  const uint32_t left = padding.leftPadding, right = padding.rightPadding;
  op.require(std::max(left, right) * sizeof(T) <= ascend_twin::kBlockBytes, "more than 32 bytes of padding");
  const uint64_t length = params.blockLen / sizeof(T);
  const uint64_t filled = ascend_twin::round_up(left + length + right, ascend_twin::kBlockElements<T>);
  const uint64_t src_distance = length + params.srcStride / sizeof(T);
  const uint64_t dst_distance = filled + params.dstStride * ascend_twin::kBlockElements<T>;
  if (length == 0) return;
  for (uint64_t row = 0; row < params.blockCount; ++row) {
    const T* in = op.read("src", src, row * src_distance, length);
    T* out = op.write("dst", dst, row * dst_distance, filled);
    T anything;
    std::memset(static_cast<void*>(&anything), 0xff, sizeof anything);
    const T fill = padding.isPad ? padding.paddingValue : left + right == 0 ? in[0] : anything;
    std::fill_n(out, filled, fill);
    std::copy_n(in, length, out + left);
  }
}

// Rows of any length, to global memory: nothing but the row is written.
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params,
                 ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("DataCopyPad", PIPE_MTE3, site);
  op.require(params.blockCount <= 4095 && params.blockLen < (1 << 21), "at most 4095 rows of 2097151 bytes, not ",
             params.blockCount, " of ", params.blockLen);
  op.require(params.blockLen % sizeof(T) == 0 && params.dstStride % sizeof(T) == 0, "rows of ", params.blockLen,
             " bytes with gaps of ", params.dstStride, " bytes are not whole elements");
  const uint64_t length = params.blockLen / sizeof(T);
  const uint64_t filled = ascend_twin::round_up(length, ascend_twin::kBlockElements<T>);
  for (uint64_t row = 0; row < params.blockCount; ++row) {
    const T* in = op.read("src", src, row * (filled + params.srcStride * ascend_twin::kBlockElements<T>), length);
    op.store("dst", dst, row * (length + params.dstStride / sizeof(T)), in, length);
  }
}

// Row-major matrices to L1, as columns of 32 bytes: element (row, column) of a matrix goes to block
// column / C0 · dstNzC0Stride + row · dstNzNStride. A last column that is not whole is filled with zeros.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& params,
              ascend_twin::Site site = ascend_twin::Site::here()) {
  constexpr uint32_t kC0 = ascend_twin::kBlockElements<T>;
  const ascend_twin::Instruction op("DataCopy from ND to NZ", PIPE_MTE2, site);
  op.require(params.nValue <= 16384 && params.dstNzC0Stride <= 16384 && params.dstNzNStride <= 16384,
             "nValue, dstNzC0Stride and dstNzNStride are at most 16384");
  op.require(params.dstNzC0Stride > 0 && params.dstNzNStride > 0, "dstNzC0Stride and dstNzNStride must not be 0");
  op.require(params.srcDValue >= params.dValue, "rows of ", params.dValue, " elements lie ", params.srcDValue,
             " apart");
  for (uint64_t matrix = 0; matrix < params.ndNum; ++matrix) {
    for (uint64_t row = 0; row < params.nValue; ++row) {
      const uint64_t first = matrix * params.srcNdMatrixStride + row * params.srcDValue;
      const T* in = op.read("src", src, first, params.dValue);
      for (uint32_t column = 0; column < params.dValue; column += kC0) {
        const uint64_t block = column / kC0 * params.dstNzC0Stride + row * params.dstNzNStride;
        T* out = op.write("dst", dst, matrix * params.dstNzMatrixStride + block * kC0, kC0);
        const uint32_t valid = std::min<uint32_t>(kC0, params.dValue - column);
        std::fill(std::copy_n(in + column, valid, out), out + kC0, T(0.0f));
      }
    }
  }
}

}  // namespace AscendC
