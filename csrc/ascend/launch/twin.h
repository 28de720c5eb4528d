// What the launchers on the CPU twin share. Each is a C function that runs a kernel and returns a report in JSON, in a
// string from malloc. They stand where <<<>>> stands on an NPU; mindspeed_kernels/ascend_twin.py calls them.
#pragma once

#include "json.h"
#include "launch.h"

namespace mindspeed::ascend {

using ascend_twin::Cores;
using ascend_twin::GlobalBuffer;
using ascend_twin::Use;

// The element types, as mindspeed_kernels/ascend_twin.py numbers them.
enum Type { kFloat, kBfloat16, kHalf };

inline int64_t bytes_of(int type) { return type == kFloat ? 4 : 2; }

template <class F>
void with_type(int type, F f) {
  if (type == kFloat) f(float());
  if (type == kBfloat16) f(bfloat16_t());
  if (type == kHalf) f(half());
}

// Of kernels that multiply on the cube.
template <class F>
void with_half_type(int type, F f) {
  if (type == kBfloat16) f(bfloat16_t());
  if (type == kHalf) f(half());
}

// How to run: on how many blocks, and without which barrier or wait ("file.h:12", or "").
struct Run {
  int blocks;
  const char* dropped_sync;
};

template <class F>
char* run(const char* kernel, Cores cores, const Run& how, std::vector<GlobalBuffer> buffers, F f) {
  std::vector<GlobalBuffer> present;
  for (GlobalBuffer& buffer : buffers) {
    if (buffer.data != nullptr) present.push_back(std::move(buffer));
  }
  return to_c_string(ascend_twin::launch({kernel, true, how.dropped_sync}, cores, how.blocks, std::move(present), f));
}

// The answer to a call that a kernel is not made for.
template <class... Why>
char* refuse(const char* kernel, const Why&... why) {
  ascend_twin::Report report;
  report.errors.push_back(ascend_twin::text(kernel, ": ", why...));
  return to_c_string(report);
}

inline GM_ADDR gm(const void* data) { return static_cast<GM_ADDR>(const_cast<void*>(data)); }

inline GlobalBuffer input(const char* name, const void* data, int64_t bytes) {
  return {name, const_cast<void*>(data), uint64_t(bytes), Use::kInput};
}

inline GlobalBuffer output(const char* name, void* data, int64_t bytes) {
  return {name, data, uint64_t(bytes), Use::kOutput};
}

inline GlobalBuffer workspace(void* data, int64_t bytes) {
  return {"workspace", data, uint64_t(bytes), Use::kWorkspace};
}

}  // namespace mindspeed::ascend
