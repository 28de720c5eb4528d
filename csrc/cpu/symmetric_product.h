// What the product of a matrix with its own transpose hands to its kernel.
#pragma once

#include "common/dispatch.h"
#include "common/group_block.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// out[g] = alpha · y[g] · y[g]ᵀ + beta · x[g] for symmetric x. Items are blocks on and below the diagonal of [size,
// size]; what a block computes is written above the diagonal too.
struct SymmetricProduct {
  DType type;
  int64_t size, depth;
  const GroupBlock* blocks;
  GroupMatrices y;  // [groups] of [size, depth]
  const void* x;    // [groups, size, size] without gaps, or nullptr
  float alpha, beta;
  void* out;  // [groups, size, size]
};

MINDSPEED_KERNEL(symmetric_product_kernel, SymmetricProduct)

}  // namespace mindspeed::cpu
