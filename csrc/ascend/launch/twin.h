// What the C functions that run kernels on the CPU twin share. Each returns a report in JSON, in a string from malloc;
// mindspeed_kernels/ascend_twin.py calls them.
#pragma once

#include "json.h"
#include "twin_launch.h"

namespace mindspeed::ascend {

// How to run: on how many blocks, without which barrier or wait ("file.h:12", or ""), and with how many buffers per
// queue at most (0: as many as it asks for).
struct Run {
  int blocks;
  const char* dropped_sync;
  int max_buffers;
};

// `start` launches one kernel.
template <class F>
char* run(const Run& how, F start) {
  TwinRun here{how.dropped_sync, how.max_buffers, {}};
  twin_run = &here;
  start(Launch{how.blocks, nullptr});
  twin_run = nullptr;
  return to_c_string(here.report);
}

// The answer to a call that a kernel is not made for.
template <class... Why>
char* refuse(const char* kernel, const Why&... why) {
  ascend_twin::Report report;
  report.errors.push_back(ascend_twin::text(kernel, ": ", why...));
  return to_c_string(report);
}

inline Memory input(const char* name, const void* data, int64_t bytes) {
  return {name, const_cast<void*>(data), bytes, Use::kInput};
}

inline Memory output(const char* name, void* data, int64_t bytes) { return {name, data, bytes, Use::kOutput}; }
inline Memory in_out(const char* name, void* data, int64_t bytes) { return {name, data, bytes, Use::kInOut}; }
inline Memory workspace(void* data, int64_t bytes) { return {"workspace", data, bytes, Use::kWorkspace}; }

}  // namespace mindspeed::ascend
