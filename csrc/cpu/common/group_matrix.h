// A group's matrix as an operand.
#pragma once

#include "gemm.h"
#include "group_block.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

template <class T>
Matrix<T> matrix_of(const GroupMatrices& matrices, int64_t group) {
  return {static_cast<const T*>(matrices.data) + group * matrices.group_stride, matrices.stride, matrices.transposed};
}

// Rows from `first` on, or those that `index` names from there on.
template <class T>
Matrix<T> matrix_of(InputRows rows, const int64_t* index, int64_t first) {
  const T* data = static_cast<const T*>(rows.data);
  if (index != nullptr) return {data, rows.stride, false, index + first};
  return {data + first * rows.stride, rows.stride};
}

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
