// Sums over all rows that do not show the number of threads: chunks of rows add up on their own, and their sums in
// order.
#pragma once

#include <algorithm>

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// How many chunks there are, the number of rows alone says.
struct Chunks {
  int64_t count, rows_per_chunk;

  explicit Chunks(int64_t rows, int64_t min_rows = 16) {
    constexpr int64_t kMaxChunks = 64;
    rows_per_chunk = std::max(min_rows, (rows + kMaxChunks - 1) / kMaxChunks);
    count = (rows + rows_per_chunk - 1) / rows_per_chunk;
  }
};

// The sum over chunks, rounded once. Items are columns.
struct ChunkSum {
  int64_t chunks, columns;
  const float* partial;  // [chunks, columns]
  DType type;
  void* total;  // [columns]
};

MINDSPEED_KERNEL(chunk_sum_kernel, ChunkSum)

}  // namespace mindspeed::cpu
