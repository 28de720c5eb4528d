// Launches on the CPU twin, which the host code does not tell from an NPU.
#pragma once

#include <stdexcept>

#include "launch.h"
#include "twin/launch.h"

namespace mindspeed::ascend {

using ascend_twin::Cores;

// Launches of this thread that leave out a barrier or wait ("file.h:12", or ""), give queues no more buffers than a
// limit (or 0), and are reported on. Without one, what the twin finds is thrown.
struct TwinRun {
  std::string dropped_sync;
  int max_buffers;
  ascend_twin::Report report;
};

inline thread_local TwinRun* twin_run = nullptr;

inline void add_buffer(std::vector<ascend_twin::GlobalBuffer>& buffers, const Memory& memory) {
  if (memory.data == nullptr) return;
  const auto use = static_cast<ascend_twin::Use>(memory.use);  // declared alike
  buffers.push_back({memory.name, memory.data, uint64_t(memory.bytes), use});
}

template <class Tiling>
void add_buffer(std::vector<ascend_twin::GlobalBuffer>&, const Tiling&) {}

template <class Kernel, class... Arguments>
void launch_on_twin(const char* name, Cores cores, const Launch& launch, Kernel kernel, const Arguments&... arguments) {
  std::vector<ascend_twin::GlobalBuffer> buffers;
  (add_buffer(buffers, arguments), ...);
  ascend_twin::Options options{name};
  if (twin_run != nullptr) options.dropped_sync = twin_run->dropped_sync, options.max_buffers = twin_run->max_buffers;
  ascend_twin::Report report =
      ascend_twin::launch(options, cores, launch.blocks, std::move(buffers), [&] { kernel(arguments...); });
  if (twin_run != nullptr) {
    twin_run->report = std::move(report);
    return;
  }
  std::string message;
  for (const std::string& error : report.errors) message += error + "\n";
  if (!message.empty()) throw std::runtime_error(message);
}

}  // namespace mindspeed::ascend
