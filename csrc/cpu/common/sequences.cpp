#include "sequences.h"

#include <algorithm>

namespace mindspeed::cpu {

std::vector<int64_t> integers(const char* op, const char* name, const Tensor& tensor) {
  MINDSPEED_CHECK(tensor.is_cpu() && tensor.dim() == 1 &&
                      (tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long),
                  op, ": ", name, " must be one dimension of int32 or int64 on the CPU, but is ", shape(tensor), " of ",
                  tensor.scalar_type());
  const Tensor wide = torch::stable::contiguous(torch::stable::to(tensor, ScalarType::Long));
  const int64_t* data = wide.const_data_ptr<int64_t>();
  return {data, data + wide.numel()};
}

void check_boundaries(const char* op, const char* name, const std::vector<int64_t>& boundaries, int64_t tokens) {
  const bool ascending = std::is_sorted(boundaries.begin(), boundaries.end());
  MINDSPEED_CHECK(!boundaries.empty() && ascending && boundaries.front() >= 0 && boundaries.back() <= tokens, op, ": ",
                  name, " must ascend within the ", tokens, " tokens");
}

std::vector<Sequence> sequences_of(const char* op, const Tensor& x, const std::optional<Tensor>& cu_seqlens) {
  const int64_t batch = x.size(0), length = x.size(1);
  std::vector<Sequence> sequences;
  if (cu_seqlens) {
    const std::vector<int64_t> ends = integers(op, "cu_seqlens", *cu_seqlens);
    check_boundaries(op, "cu_seqlens", ends, batch * length);
    for (size_t i = 0; i + 1 < ends.size(); ++i) sequences.push_back({ends[i], ends[i + 1]});
  } else {
    for (int64_t i = 0; i < batch; ++i) sequences.push_back({i * length, (i + 1) * length});
  }
  return sequences;
}

}  // namespace mindspeed::cpu
