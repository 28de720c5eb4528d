// What the twin's own test kernels share.
#pragma once

#include <map>
#include <string>

#include "launch.h"

namespace twin_tests {

using namespace AscendC;
using ascend_twin::Cores;
using ascend_twin::Use;

constexpr int kElements = 1024;
constexpr uint32_t kOperandBytes = 8192;  // of an instruction that is tested alone

// Global memory of a test kernel: an input, two outputs and a workspace, of kElements floats each.
struct Arguments {
  float *x, *y, *z, *workspace;
};

// A kernel that is right, and wrong in one place when the bug is seeded.
struct Bug {
  Cores cores;
  int blocks;
  void (*kernel)(const Arguments&, bool seeded);
  Use y = Use::kOutput;  // kWorkspace where the kernel does not write y
};

// By name. Each test source adds its own.
std::map<std::string, Bug>& bugs();

struct AddBugs {
  explicit AddBugs(std::map<std::string, Bug> more) { bugs().merge(more); }
};

inline GlobalTensor<float> global(float* data) {
  GlobalTensor<float> tensor;
  tensor.SetGlobalBuffer(data, kElements);
  return tensor;
}

// Memory of a size that only the launch knows.
template <class T>
GlobalTensor<T> all_of(uint8_t* data) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<T*>(data));
  return tensor;
}

// Writes all of an output, so that only the seeded bug is wrong.
inline void fill(TPipe& pipe, float* data) {
  TQue<TPosition::VECOUT, 1> queue;
  pipe.InitBuffer(queue, 1, kElements * sizeof(float));
  LocalTensor<float> local = queue.AllocTensor<float>();
  Duplicate(local, 1.0f, kElements);
  queue.EnQue(local);
  local = queue.DeQue<float>();
  DataCopy(global(data), local, kElements);
  queue.FreeTensor(local);
}

}  // namespace twin_tests
