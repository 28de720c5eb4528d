// Runs a kernel on the twin.
#pragma once

#include <functional>
#include <thread>

#include "kernel_operator.h"

namespace ascend_twin {

// A block is one vector core, one cube core, or a cube core and two vector cores.
enum class Cores { kVector, kCube, kMixed };

inline void check_at_end(Core& core) {
  for (const auto& buffer : core.buffers) {
    if (buffer->state == Buffer::kAllocated) core.report(text(buffer->label, " was never freed"));
    if (buffer->state == Buffer::kQueued) core.report(text(buffer->label, " was never taken from its queue"));
    // TPipe's destructor waits for the flags of buffers that were freed.
    if (buffer->state == Buffer::kFree && buffer->freed_event >= 0) {
      wait_flag(buffer->emptied, buffer->freed_event);
    }
  }
  for (const auto& [flag, clock] : core.flags) {
    const EventPipes pipes = pipes_of(flag.first);
    core.report(text("event ", flag.second, " from pipe ", kPipeNames[pipes.source], " to pipe ",
                     kPipeNames[pipes.destination], " was set, but never waited for"));
  }
  if (core.atomic_add) core.report("atomic addition was never turned off");
}

inline void run_core(Core& core, const std::function<void()>& kernel) {
  current_core = &core;
  Launch& launch = core.launch;
  try {
    kernel();
    check_at_end(core);
  } catch (const KernelError& error) {
    const std::lock_guard<std::mutex> lock(launch.mutex);
    launch.add_error(error.what());
    launch.aborted = true;
  } catch (const Aborted&) {
  }
  current_core = nullptr;
  const std::lock_guard<std::mutex> lock(launch.mutex);
  launch.report.counters.add(core.counters);
  for (const auto& [site, queue] : core.queues) {
    QueueUse& all = launch.report.queues[site];
    all.buffers = queue.buffers, all.filled += queue.filled, all.overlapped += queue.overlapped;
  }
  --launch.running;
  launch.changed.notify_all();
}

inline void check_at_end(Launch& launch) {
  for (const auto& [group, senders] : launch.sent) {
    for (const auto& [sender, clocks] : senders) {
      if (clocks.empty()) continue;
      launch.add_error(text(launch.options.kernel, " on ", launch.core_names[sender], ": cross-core flag ",
                            std::get<1>(group), " was set, but not by all cores of its group"));
    }
  }
  for (int core = 0; core < launch.cores; ++core) {
    for (const auto& [flag, clocks] : launch.arrived[core]) {
      if (clocks.empty()) continue;
      launch.add_error(text(launch.options.kernel, " on ", launch.core_names[core], ": cross-core flag ", flag,
                            " came, but was never waited for"));
    }
  }
  for (const GlobalBuffer& buffer : launch.buffers) {
    if (buffer.use != Use::kOutput || launch.aborted || buffer.bytes == 0) continue;
    const uint64_t unwritten = launch.global.first_unwritten(buffer.begin(), buffer.end());
    if (unwritten == buffer.end()) continue;
    launch.add_error(
        text(launch.options.kernel, ": byte ", unwritten - buffer.begin(), " of ", buffer.name, " was never written"));
  }
}

// Runs `kernel` on every core of `blocks` blocks. Arguments in global memory have to be named in `buffers`.
inline Report launch(const Options& options, Cores cores, int blocks, std::vector<GlobalBuffer> buffers,
                     const std::function<void()>& kernel) {
  Launch launch;
  launch.options = options;
  launch.blocks = blocks;
  launch.cube = cores != Cores::kVector;
  launch.sub_blocks = cores == Cores::kMixed ? 2 : cores == Cores::kVector ? 1 : 0;
  launch.buffers = std::move(buffers);
  const int per_block = launch.cube + launch.sub_blocks;
  launch.cores = launch.running = blocks * per_block;
  launch.arrived.resize(launch.cores);
  for (int i = 0; i < launch.cores; ++i) {
    const int block = i / per_block, sub_block = i % per_block - launch.cube;
    launch.core_names.push_back(sub_block < 0 ? text("AIC ", block)
                                              : text("AIV ", block * launch.sub_blocks + sub_block));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < launch.cores; ++i) {
    threads.emplace_back([&launch, &kernel, i, per_block] {
      const int block = i / per_block, sub_block = i % per_block - launch.cube;
      Core core(launch, sub_block < 0 ? CoreKind::kCube : CoreKind::kVector, i, block, std::max(0, sub_block));
      run_core(core, kernel);
    });
  }
  for (std::thread& thread : threads) thread.join();
  check_at_end(launch);
  return launch.report;
}

}  // namespace ascend_twin
