// What a core of dav-2201 (Atlas A2 and A3) has: pipes, memories and their limits.
#pragma once

#include <cstdint>

// Each pipe executes its instructions on its own; the scalar pipe issues all of them in program order.
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace ascend_twin {

constexpr int kPipes = 7;
constexpr const char* kPipeNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};

// A cube core (AIC) has L1, L0A, L0B and L0C, a vector core (AIV) has the unified buffer (UB).
enum class CoreKind { kCube, kVector };

enum Memory { kUnifiedBuffer, kL1, kL0A, kL0B, kL0C, kMemories };

struct MemoryFacts {
  const char* name;
  uint32_t bytes, alignment;
};

constexpr MemoryFacts kMemoryFacts[] = {
    {"UB", 192 << 10, 32},  {"L1", 512 << 10, 32},  {"L0A", 64 << 10, 512},
    {"L0B", 64 << 10, 512}, {"L0C", 128 << 10, 64},
};

constexpr uint32_t kBlockBytes = 32;    // what vector strides and unpadded copies count in
constexpr uint32_t kRepeatBytes = 256;  // what one repeat of a vector instruction covers: 8 blocks
constexpr uint32_t kFractal = 16;       // rows of a 512-byte cube fractal, columns of one of L0C's
constexpr int kEventIds = 8;            // flags between one pair of pipes
constexpr int kCrossCoreFlags = 11;     // flags between cores that are free; SyncAll uses 11 to 14
constexpr int kMaxBuffers = 64;         // buffers of one kernel, queues' and others

// Select with a scalar and with two tensors keeps temporaries in the last bytes of UB.
constexpr uint32_t kSelectReservedBytes = 8 << 10;

}  // namespace ascend_twin
