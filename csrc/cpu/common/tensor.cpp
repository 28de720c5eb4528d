#include "tensor.h"

#include <array>

namespace mindspeed::cpu {

std::string shape(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.size(d);
  text << ']';
  return text.str();
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

bool same_shape(const Tensor& a, const Tensor& b) { return sizes_of(a) == sizes_of(b); }

DType dtype_of(const Tensor& tensor, const char* op, const char* argument) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      fail(op, ": ", argument, " must be float32, bfloat16 or float16, but is ", tensor.scalar_type(),
           "; the functions of mindspeed_kernels also take float64");
  }
}

Tensor empty_like(const Tensor& model, ScalarType dtype) {
  using torch::stable::detail::from, torch::stable::detail::to;
  // (self, dtype, layout, device, pin_memory, memory_format); torch::stable::empty_like leaves out the dtype
  std::array<StableIValue, 6> stack = {from(model),        from(std::optional(dtype)), from(std::nullopt),
                                       from(std::nullopt), from(std::nullopt),         from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.stride(last) == 1 || tensor.size(last) <= 1 ? tensor : torch::stable::contiguous(tensor);
}

namespace {

// The one distance between all rows of [..., length], or nothing if the leading dimensions do not lie evenly.
std::optional<int64_t> row_stride(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::optional<int64_t> stride;  // of the innermost leading dimension that has more than one entry
  int64_t next = 0;               // what the stride of the dimension outside must be
  for (int64_t d = tensor.dim() - 2; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (!stride)
      stride = tensor.stride(d);
    else if (tensor.stride(d) != next)
      return std::nullopt;
    next = tensor.stride(d) * tensor.size(d);
  }
  return stride.value_or(tensor.size(tensor.dim() - 1));
}

}  // namespace

Rows::Rows(const Tensor& tensor) {
  Tensor dense = with_dense_rows(tensor);
  std::optional<int64_t> stride = row_stride(dense);
  if (!stride) {
    dense = torch::stable::contiguous(dense);
    stride = dense.size(dense.dim() - 1);
  }
  rows_ = {dense.const_data_ptr(), *stride};
  owner_ = dense;
}

int64_t count_rows(const Tensor& tensor) {
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) count *= tensor.size(d);
  return count;
}

int64_t bytes(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

OutputRows output_rows(const Tensor& tensor, bool past_cache) {
  constexpr uintptr_t kCacheLine = 64;
  void* data = tensor.mutable_data_ptr();
  const int64_t stride = row_stride(tensor).value();
  const bool aligned =
      (reinterpret_cast<uintptr_t>(data) | (static_cast<uintptr_t>(stride) * tensor.element_size())) % kCacheLine == 0;
  return {data, stride, past_cache && aligned};
}

}  // namespace mindspeed::cpu
