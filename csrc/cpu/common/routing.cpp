#include "routing.h"

namespace mindspeed::cpu {
namespace {

std::vector<int64_t> int64_values(const char* op, const char* name, const Tensor& tensor) {
  const bool is_int = tensor.scalar_type() == ScalarType::Int;
  MINDSPEED_CHECK(is_int || tensor.scalar_type() == ScalarType::Long, op, ": ", name,
                  " must be int32 or int64, but is ", tensor.scalar_type());
  const Tensor dense = torch::stable::contiguous(tensor);
  if (is_int) {
    const int32_t* values = dense.const_data_ptr<int32_t>();
    return {values, values + dense.numel()};
  }
  const int64_t* values = dense.const_data_ptr<int64_t>();
  return {values, values + dense.numel()};
}

}  // namespace

Routing Routing::sort(const char* op, const Tensor& expert_index, int64_t num_experts) {
  MINDSPEED_CHECK(expert_index.dim() == 2, op, ": expert_index must be [tokens, top_k], but has shape ",
                  shape(expert_index));
  MINDSPEED_CHECK(num_experts >= 0, op, ": num_experts must not be negative, but is ", num_experts);
  const std::vector<int64_t> experts = int64_values(op, "expert_index", expert_index);
  const auto is_local = [num_experts](int64_t expert) { return 0 <= expert && expert < num_experts; };

  Routing routing{expert_index.size(1), std::vector<int64_t>(num_experts + 1), std::vector<int64_t>(experts.size(), -1),
                  std::vector<int64_t>(experts.size(), -1)};
  for (const int64_t expert : experts)
    if (is_local(expert)) ++routing.bounds[expert + 1];
  for (int64_t e = 0; e < num_experts; ++e) routing.bounds[e + 1] += routing.bounds[e];
  std::vector<int64_t> next = routing.bounds;
  for (size_t assignment = 0; assignment < experts.size(); ++assignment)
    if (is_local(experts[assignment])) {
      const int64_t row = next[experts[assignment]]++;
      routing.source[row] = static_cast<int64_t>(assignment);
      routing.position[assignment] = row;
    }
  return routing;
}

std::vector<int64_t> Routing::positions(const char* op, const Tensor& source) {
  MINDSPEED_CHECK(source.dim() == 1, op, ": source must have one dimension, but has shape ", shape(source));
  const std::vector<int64_t> sources = int64_values(op, "source", source);
  const auto count = static_cast<int64_t>(sources.size());
  std::vector<int64_t> position(sources.size(), -1);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t assignment = sources[row];
    MINDSPEED_CHECK(-1 <= assignment && assignment < count, op, ": source[", row, "] must be an assignment below ",
                    count, " or -1, but is ", assignment);
    if (assignment < 0) continue;
    MINDSPEED_CHECK(position[assignment] < 0, op, ": source names assignment ", assignment, " twice");
    position[assignment] = row;
  }
  return position;
}

}  // namespace mindspeed::cpu
