// What kernels read and write, as plain data: how elements become float is the business of vec.h.
#pragma once

#include <cstdint>

namespace mindspeed::cpu {

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

enum class DType { kFloat32, kBFloat16, kFloat16 };

// Rows at equal distances, elements of a row next to each other; data is nullptr where an optional argument is absent.
struct InputRows {
  const void* data = nullptr;
  int64_t stride = 0;  // in elements
};

struct OutputRows {
  void* data = nullptr;
  int64_t stride = 0;
  bool past_cache = false;  // write without reading into the cache; only for rows aligned to 64 bytes
};

}  // namespace mindspeed::cpu
