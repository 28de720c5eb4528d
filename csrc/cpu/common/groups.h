// Rows sorted by the group (the expert) that they belong to, and the products of each group's rows cut into blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "group_block.h"
#include "tensor.h"

namespace mindspeed::cpu {

class Groups {
 public:
  // `offsets` [groups], int32 or int64: where each group's rows end; the first group begins at row 0.
  Groups(const char* op, const Tensor& offsets, int64_t rows);
  explicit Groups(std::vector<int64_t> bounds) : bounds_(std::move(bounds)) {}

  int64_t count() const { return static_cast<int64_t>(bounds_.size()) - 1; }
  int64_t begin(int64_t group) const { return bounds_[group]; }
  int64_t end(int64_t group) const { return bounds_[group + 1]; }
  int64_t rows() const { return bounds_.back(); }
  const int64_t* bounds() const { return bounds_.data(); }

  // Blocks of [rows, columns], each with rows of one group, which are counted from the first group's first.
  std::vector<GroupBlock> blocks_of_rows(int64_t columns) const;

  // Blocks of whole rows.
  std::vector<GroupBlock> blocks_of_rows() const { return blocks_of_rows(1); }

  // Blocks of one [rows, columns] for each group.
  std::vector<GroupBlock> blocks_of_matrices(int64_t rows, int64_t columns) const;

 private:
  std::vector<int64_t> bounds_;  // [groups + 1]
};

// Stacked weights [groups, n, k] as operands [k, n], or [n, k] `as_stored`; a transposed view costs no copy.
class StackedWeights {
 public:
  StackedWeights(const Tensor& weights, bool as_stored);

  operator GroupMatrices() const {
    return {weights_.const_data_ptr(), weights_.stride(0), weights_.stride(1), transposed_};
  }

 private:
  Tensor weights_;
  bool transposed_;
};

}  // namespace mindspeed::cpu
