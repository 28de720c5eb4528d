// What kernels are told of products whose rows are sorted by the group (the expert) that they belong to.
#pragma once

#include <cstdint>

namespace mindspeed::cpu {

// A part of one group's matrix that one thread computes.
struct GroupBlock {
  int64_t group, row, rows, column, columns;
};

// One stored matrix for each group: rows of neighbouring elements.
struct GroupMatrices {
  const void* data;
  int64_t group_stride, stride;  // from one group and from one stored row to the next, in elements
  bool transposed;               // the operand is the transpose of what is stored
};

}  // namespace mindspeed::cpu
