// Memory that a kernel works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#ifndef MINDSPEED_ISA
#define MINDSPEED_ISA portable
#endif

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Floats in the memory of one kernel call, aligned to cache lines.
class FloatBuffer {
 public:
  explicit FloatBuffer(int64_t size)
      : data_(static_cast<float*>(::operator new(static_cast<size_t>(size) * sizeof(float), kAlignment))) {}
  ~FloatBuffer() { ::operator delete(data_, kAlignment); }
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;

  float* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  float* data_;
};

// Memory of one thread, handed out in pieces aligned to cache lines. Without a base it only counts.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}

  float* take(int64_t floats) {
    float* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (floats + 15) / 16 * 16;
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace mindspeed::cpu::MINDSPEED_ISA
