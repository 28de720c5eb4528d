// A group's matrix as an operand.
#pragma once

#include "gemm.h"
#include "group_block.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

template <class T>
Matrix<T> matrix_of(const GroupMatrices& matrices, int64_t group) {
  const T* data = static_cast<const T*>(matrices.data);
  if (data != nullptr) data += group * matrices.group_stride;
  return {data, matrices.stride, matrices.transposed};
}

// Rows from `first` on, or those that `index` names from there on.
template <class T>
Matrix<T> matrix_of(InputRows rows, const int64_t* index, int64_t first) {
  const T* data = static_cast<const T*>(rows.data);
  if (index != nullptr) return {data, rows.stride, false, index + first};
  return Matrix<T>{data, rows.stride}.from(first, 0);
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
