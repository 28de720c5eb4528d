// What the operators' host code needs of tensors: checks that raise readable errors, and rows for the kernels.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "scalar_types.h"

namespace mindspeed::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws what Python sees as a RuntimeError, its message made of all the parts.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "mindspeed::";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Fails unless the condition holds; the parts are evaluated only then.
#define MINDSPEED_CHECK(condition, ...)                    \
  do {                                                     \
    if (!(condition)) ::mindspeed::cpu::fail(__VA_ARGS__); \
  } while (false)

// "[4, 128]", for error messages.
std::string shape(const Tensor& tensor);

bool same_shape(const Tensor& a, const Tensor& b);

// The element type of an operator's argument; an error names both when no kernel is written for it.
DType dtype_of(const Tensor& tensor, const char* op, const char* argument);

std::vector<int64_t> sizes_of(const Tensor& tensor);

// An uninitialised tensor with the shape of `model` and its order of dimensions in memory.
Tensor empty_like(const Tensor& model, ScalarType dtype);

// `tensor` itself if elements along its last dimension are neighbours in memory, otherwise a contiguous copy.
Tensor with_dense_rows(const Tensor& tensor);

// A tensor [..., length] as rows at equal distances. Owns the memory as long as a kernel needs it.
class Rows {
 public:
  Rows() = default;

  // Without a copy where the strides allow it (contiguous, a slice of columns, an expanded row), else of a copy.
  explicit Rows(const Tensor& tensor);
  explicit Rows(const std::optional<Tensor>& tensor) : Rows(tensor ? Rows(*tensor) : Rows()) {}

  operator InputRows() const { return rows_; }

 private:
  std::optional<Tensor> owner_;
  InputRows rows_;
};

// How many rows a tensor [..., length] has.
int64_t count_rows(const Tensor& tensor);

int64_t bytes(const Tensor& tensor);

// The rows that a kernel fills, of a contiguous tensor or of some of its columns, past the cache if so decided.
OutputRows output_rows(const Tensor& tensor, bool past_cache);

}  // namespace mindspeed::cpu
