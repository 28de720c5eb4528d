// Where each assignment of a token to an expert goes when the assignments are sorted by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor.h"

namespace mindspeed::cpu {

// An assignment is an entry of expert_index [tokens, top_k], counted in row-major order; those to experts outside
// [0, num_experts) are skipped.
struct Routing {
  int64_t top_k;
  std::vector<int64_t> bounds;    // [num_experts + 1], where the rows of each expert begin
  std::vector<int64_t> source;    // [tokens · top_k], the assignment in each sorted row; −1 in the rows left over
  std::vector<int64_t> position;  // [tokens · top_k], the sorted row of each assignment; −1 if it is skipped

  // Sorts stably by expert.
  static Routing sort(const char* op, const Tensor& expert_index, int64_t num_experts);

  // From `source` as moe_permute returns it, int64 [rows].
  static std::vector<int64_t> positions(const char* op, const Tensor& source);
};

}  // namespace mindspeed::cpu
