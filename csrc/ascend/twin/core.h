// A launch of a kernel and the state of the cores that run it, one thread each.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hardware.h"
#include "history.h"
#include "parameters.h"

namespace ascend_twin {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// What the hardware would hang on, trap on or silently get wrong. Ends the launch.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Another core has failed.
struct Aborted {};

// How a kernel may use an argument in global memory.
enum class Use {
  kInput,      // read only
  kOutput,     // holds garbage at first; every byte has to be written
  kInOut,      // holds values at first
  kWorkspace,  // holds garbage at first
};

struct GlobalBuffer {
  std::string name;
  void* data;
  uint64_t bytes;
  Use use;

  uint64_t begin() const { return reinterpret_cast<uint64_t>(data); }
  uint64_t end() const { return begin() + bytes; }
};

// What the cores did, summed up.
struct Counters {
  uint64_t gm_read = 0, gm_written = 0;              // bytes between global memory and the cores
  uint64_t l1_read = 0;                              // bytes from L1 to L0A and L0B
  uint64_t vector_repeats = 0, vector_critical = 0;  // repeats of vector instructions: all, and the busiest core's
  uint64_t cube_flops = 0, cube_flops_padded = 0;    // 2 m n k, and the same in whole fractals
  uint64_t instructions[kPipes] = {};
  uint64_t peak[kMemories] = {};  // bytes of the fullest core

  void add(const Counters& core) {
    gm_read += core.gm_read;
    gm_written += core.gm_written;
    l1_read += core.l1_read;
    vector_repeats += core.vector_repeats;
    vector_critical = std::max(vector_critical, core.vector_repeats);
    cube_flops += core.cube_flops;
    cube_flops_padded += core.cube_flops_padded;
    for (int p = 0; p < kPipes; ++p) instructions[p] += core.instructions[p];
    for (int m = 0; m < kMemories; ++m) peak[m] = std::max(peak[m], core.peak[m]);
  }
};

// What became of the buffers of a queue.
struct QueueUse {
  int buffers = 0;
  uint64_t filled = 0;
  // Of these, the ones that could be filled while the one before them was emptied: no flag, barrier or wait has the
  // pipe that fills wait for anything that the other one does with that buffer.
  uint64_t overlapped = 0;
};

struct Options {
  std::string kernel;
  // Without it, instructions of the vector pipe are taken to wait for each other, and the scalar pipe and the others
  // too: what the compiler's automatic synchronisation is for.
  bool strict = true;
  // "file.h:12": the barrier or wait at this place has no effect, as if it had been left out.
  std::string dropped_sync = "";
  int max_buffers = 0;  // of a queue, whatever it asks for; 0: no limit
};

struct Report {
  std::vector<std::string> errors;
  std::set<std::string> sync_sites;        // where barriers and waits were executed
  std::map<std::string, QueueUse> queues;  // by where their InitBuffer is, of all cores
  Counters counters;
};

// A buffer of local memory, from TPipe::InitBuffer.
struct Buffer {
  enum State { kFree, kAllocated, kQueued, kPlain };  // a plain one belongs to no queue

  Memory memory;
  AscendC::TPosition position;
  uint32_t offset, bytes;
  std::string label;
  State state = kFree;
  uint32_t generation = 0;       // counts the allocations from its queue, so that a stale tensor is known
  AscendC::HardEvent emptied{};  // the flag that FreeTensor sets, of the pipes of its queue
  int enqueued_event = -1, freed_event = -1;
  bool taken = false;     // since it was filled last
  uint64_t taken_at = 0;  // what the pipe that empties it had been given by then
};

// The cores that send a flag together: mode, flag, kind of core, block (-1: all blocks).
using FlagGroup = std::tuple<int, int, CoreKind, int>;

// What all cores of a launch share.
struct Launch {
  Options options;
  int blocks = 1, sub_blocks = 1;  // sub_blocks: vector cores per block
  bool cube = false;               // blocks have a cube core
  int cores = 0;
  std::vector<std::string> core_names;
  std::vector<GlobalBuffer> buffers;

  std::mutex mutex;
  std::condition_variable changed;
  Shadow global;                                               // of global memory, by address
  std::map<FlagGroup, std::map<int, std::deque<Clock>>> sent;  // flags that wait for more senders: by core, its clocks
  std::vector<std::map<int, std::deque<Clock>>> arrived;       // of each core, by flag: what its counter counts
  std::map<int, int> waiting;                                  // cores that wait: for which flag
  int running = 0;
  bool aborted = false;
  Report report;

  int agents() const { return cores * kPipes; }

  // Whether every core that has not ended waits for a flag that nobody is left to send. With the mutex held.
  bool deadlocked() {
    if (waiting.empty() || int(waiting.size()) < running) return false;
    return std::all_of(waiting.begin(), waiting.end(), [&](auto& w) { return arrived[w.first][w.second].empty(); });
  }

  void add_error(const std::string& error) {
    constexpr size_t kMaxErrors = 20;
    auto& errors = report.errors;
    if (errors.size() < kMaxErrors && std::find(errors.begin(), errors.end(), error) == errors.end()) {
      errors.push_back(error);
    }
  }
};

struct Core {
  Launch& launch;
  CoreKind kind;
  int index, block, sub_block;

  std::vector<uint8_t> bytes[kMemories];
  Shadow shadow[kMemories];
  uint32_t used[kMemories] = {};
  std::vector<std::unique_ptr<Buffer>> buffers;

  uint64_t issued[kPipes] = {};
  Clock clocks[kPipes];                                       // what is finished before a pipe's next instruction
  std::map<std::pair<AscendC::HardEvent, int>, Clock> flags;  // that are set
  std::set<std::pair<AscendC::HardEvent, int>> reserved_events;
  bool atomic_add = false;
  bool full_float = false;  // products of floats are known not to round them
  Counters counters;
  std::map<std::string, QueueUse> queues;

  Core(Launch& launch, CoreKind kind, int index, int block, int sub_block)
      : launch(launch), kind(kind), index(index), block(block), sub_block(sub_block) {
    for (Clock& clock : clocks) clock = Clock(launch.agents());
  }

  int agent(pipe_t pipe) const { return index * kPipes + pipe; }

  std::string context() const { return text(launch.options.kernel, " on ", launch.core_names[index], ": "); }

  // The clock of what comes after everything that `pipe` has been given so far.
  Clock after(pipe_t pipe) const {
    Clock clock = clocks[pipe];
    clock.advance(agent(pipe), issued[pipe]);
    return clock;
  }

  // The next instructions of `pipe` come after `clock`. A waiting scalar pipe issues nothing, to no pipe.
  void wait(pipe_t pipe, const Clock& clock) {
    if (pipe != PIPE_S) return clocks[pipe].join(clock);
    for (Clock& c : clocks) c.join(clock);
  }

  bool happened_before(const Access& earlier, pipe_t pipe) const {
    if (clocks[pipe][earlier.agent] >= earlier.time) return true;
    if (earlier.agent == agent(pipe) && (pipe == PIPE_S || earlier.time == issued[pipe])) return true;
    if (launch.options.strict || earlier.agent / kPipes != index) return false;
    const int other = earlier.agent % kPipes;
    return (pipe == PIPE_V && other == PIPE_V) || pipe == PIPE_S || other == PIPE_S;
  }

  const Buffer* buffer_at(Memory memory, uint32_t offset) const {
    for (const auto& buffer : buffers) {
      if (buffer->memory == memory && offset >= buffer->offset && offset < buffer->offset + buffer->bytes) {
        return buffer.get();
      }
    }
    return nullptr;
  }

  void report(const std::string& error) {
    const std::lock_guard<std::mutex> lock(launch.mutex);
    launch.add_error(context() + error);
  }
};

inline thread_local Core* current_core = nullptr;

inline Core& core() { return *current_core; }

[[noreturn]] inline void fail(const std::string& error) { throw KernelError(core().context() + error); }

}  // namespace ascend_twin
