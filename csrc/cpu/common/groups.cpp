#include "groups.h"

#include <algorithm>
#include <utility>

#include "parallel.h"

namespace mindspeed::cpu {
namespace {

// How large a block is at most. Packing the operands, which each block does for itself, costs the less beside the
// product the larger it is.
struct BlockSize {
  int64_t rows, columns;
};

// Appends the blocks of the rows [begin, end) of a group, all about alike.
void append_blocks(std::vector<GroupBlock>& blocks, BlockSize size, int64_t group, int64_t begin, int64_t end,
                   int64_t columns) {
  const auto cut = [](int64_t length, int64_t size) { return std::max<int64_t>(1, (length + size - 1) / size); };
  const int64_t down = cut(end - begin, size.rows), across = cut(columns, size.columns);
  for (int64_t c = 0; c < across; ++c)
    for (int64_t r = 0; r < down; ++r) {
      const int64_t row = begin + (end - begin) * r / down, column = columns * c / across;
      const int64_t next_row = begin + (end - begin) * (r + 1) / down, next_column = columns * (c + 1) / across;
      if (row < next_row && column < next_column)
        blocks.push_back({group, row, next_row - row, column, next_column - column});
    }
}

// The largest blocks of all groups that keep every thread busy to the end. `bounds(group)` are the group's rows.
template <class Bounds>
std::vector<GroupBlock> cut_groups(int64_t groups, int64_t columns, Bounds&& bounds) {
  constexpr int64_t kBlocksPerThread = 4, kSmallestRows = 128;
  for (BlockSize size{512, 1056};; size = {size.rows / 2, size.columns / 2}) {
    std::vector<GroupBlock> blocks;
    for (int64_t g = 0; g < groups; ++g) {
      const auto [begin, end] = bounds(g);
      append_blocks(blocks, size, g, begin, end, columns);
    }
    if (static_cast<int64_t>(blocks.size()) >= kBlocksPerThread * num_threads() || size.rows <= kSmallestRows)
      return blocks;
  }
}

}  // namespace

Groups::Groups(const char* op, const Tensor& offsets, int64_t rows) {
  MINDSPEED_CHECK(offsets.dim() == 1, op, ": offsets must have one dimension, but have shape ", shape(offsets));
  const Tensor dense = torch::stable::contiguous(offsets);
  const bool is_int = offsets.scalar_type() == ScalarType::Int;
  MINDSPEED_CHECK(is_int || offsets.scalar_type() == ScalarType::Long, op, ": offsets must be int32 or int64, but are ",
                  offsets.scalar_type());
  bounds_.reserve(offsets.size(0) + 1);
  bounds_.push_back(0);
  for (int64_t g = 0; g < offsets.size(0); ++g) {
    const int64_t end = is_int ? dense.const_data_ptr<int32_t>()[g] : dense.const_data_ptr<int64_t>()[g];
    MINDSPEED_CHECK(bounds_.back() <= end && end <= rows, op, ": offsets must ascend from 0 to at most the ", rows,
                    " rows, but offsets[", g, "] is ", end, " after ", bounds_.back());
    bounds_.push_back(end);
  }
}

std::vector<GroupBlock> Groups::blocks_of_rows(int64_t columns) const {
  return cut_groups(count(), columns, [&](int64_t g) { return std::pair(begin(g), end(g)); });
}

std::vector<GroupBlock> Groups::blocks_of_matrices(int64_t rows, int64_t columns) const {
  return cut_groups(count(), columns, [&](int64_t) { return std::pair<int64_t, int64_t>(0, rows); });
}

StackedWeights::StackedWeights(const Tensor& weights, bool as_stored) : weights_(weights), transposed_(!as_stored) {
  if (weights.stride(2) != 1 && weights.stride(1) == 1 && weights.size(2) > 1) {
    weights_ = torch::stable::transpose(weights, 1, 2);
    transposed_ = !transposed_;
  } else {
    weights_ = with_dense_rows(weights);
  }
}

}  // namespace mindspeed::cpu
