// What the grouped matrix product hands to its kernels.
#pragma once

#include "common/dispatch.h"
#include "common/group_block.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// y[r] = x[r] · weight[g] + bias_scale[r] · bias[g], with g the group of row r. Items are blocks of y [rows, columns].
struct GroupedGemm {
  DType type;
  int64_t depth, columns;
  const GroupBlock* blocks;
  InputRows x;              // [rows, depth]
  GroupMatrices weight;     // [groups] of [depth, columns]
  const float* bias;        // [groups, columns] or nullptr
  const float* bias_scale;  // [rows], with bias
  OutputRows y;             // [rows, columns]
};

// z[g] = the sum over the rows r of group g of left[r]ᵀ · right[r]. Items are blocks of z [groups, rows, columns].
struct GroupedOuterProduct {
  DType type;
  const int64_t* bounds;  // [groups + 1], where each group's rows begin
  const GroupBlock* blocks;
  InputRows left, right;                    // [rows of all groups, rows of z], [.., columns of z]
  const int64_t *left_index, *right_index;  // where each row lies in left and right; nullptr if in order
  void* z;                                  // contiguous
  int64_t rows, columns;                    // of z[g]
};

MINDSPEED_KERNEL(grouped_gemm_kernel, GroupedGemm)
MINDSPEED_KERNEL(grouped_outer_product_kernel, GroupedOuterProduct)

}  // namespace mindspeed::cpu
