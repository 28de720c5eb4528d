#include "groups.h"

#include <algorithm>

namespace mindspeed::cpu {
namespace {

// Large enough that packing the operands, which each block does for itself, costs little beside the product.
constexpr int64_t kBlockRows = 512, kBlockColumns = 528;

// Appends the blocks of the rows [begin, end) of a group, all about alike.
void append_blocks(std::vector<GroupBlock>& blocks, int64_t group, int64_t begin, int64_t end, int64_t columns) {
  const auto cut = [](int64_t length, int64_t size) { return std::max<int64_t>(1, (length + size - 1) / size); };
  const int64_t down = cut(end - begin, kBlockRows), across = cut(columns, kBlockColumns);
  for (int64_t c = 0; c < across; ++c)
    for (int64_t r = 0; r < down; ++r) {
      const int64_t row = begin + (end - begin) * r / down, column = columns * c / across;
      const int64_t next_row = begin + (end - begin) * (r + 1) / down, next_column = columns * (c + 1) / across;
      if (row < next_row && column < next_column)
        blocks.push_back({group, row, next_row - row, column, next_column - column});
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
  std::vector<GroupBlock> blocks;
  for (int64_t g = 0; g < count(); ++g) append_blocks(blocks, g, begin(g), end(g), columns);
  return blocks;
}

std::vector<GroupBlock> Groups::blocks_of_matrices(int64_t rows, int64_t columns) const {
  std::vector<GroupBlock> blocks;
  for (int64_t g = 0; g < count(); ++g) append_blocks(blocks, g, 0, rows, columns);
  return blocks;
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
