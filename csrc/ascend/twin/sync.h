// Order between pipes of a core (flags, barriers) and between cores, and atomic addition.
#pragma once

#include "queue.h"

namespace ascend_twin {

// Notes a place that waits; false if the launch is to run without it.
inline bool syncs_at(Site site) {
  Launch& launch = core().launch;
  const std::lock_guard<std::mutex> lock(launch.mutex);
  launch.report.sync_sites.insert(site.text());
  return site.text() != launch.options.dropped_sync;
}

inline void barrier_all() {
  Core& c = core();
  Clock all = c.after(PIPE_S);
  for (int p = PIPE_V; p < kPipes; ++p) all.join(c.after(pipe_t(p)));
  for (Clock& clock : c.clocks) clock.join(all);
}

// The cores of a kind in one block (-1: in all).
inline std::vector<int> cores_of(CoreKind kind, int only_block) {
  const Launch& l = core().launch;
  const int per_block = l.cube + l.sub_blocks;
  std::vector<int> cores;
  for (int block = 0; block < l.blocks; ++block) {
    if (only_block >= 0 && block != only_block) continue;
    for (int i = 0; i < per_block; ++i) {
      const bool is_cube = l.cube && i == 0;
      if (is_cube == (kind == CoreKind::kCube)) cores.push_back(block * per_block + i);
    }
  }
  return cores;
}

// When all cores of this one's group have sent the flag, the counters of its receivers go up by one.
inline void send_cross_core(int mode, int flag, pipe_t pipe) {
  Core& c = core();
  Launch& l = c.launch;
  const int block = mode == 0 ? -1 : c.block;
  const CoreKind other = c.kind == CoreKind::kCube ? CoreKind::kVector : CoreKind::kCube;
  const std::lock_guard<std::mutex> lock(l.mutex);
  auto& sent = l.sent[{mode, flag, c.kind, block}];
  sent[c.index].push_back(c.after(pipe));
  const std::vector<int> senders = cores_of(c.kind, block);
  if (!std::all_of(senders.begin(), senders.end(), [&](int sender) { return !sent[sender].empty(); })) return;
  Clock all(l.agents());
  for (const int sender : senders) {
    all.join(sent[sender].front());
    sent[sender].pop_front();
  }
  for (const int receiver : cores_of(mode == 2 ? other : c.kind, block)) l.arrived[receiver][flag].push_back(all);
  l.changed.notify_all();
}

inline void receive_cross_core(int flag, Site site, bool effective) {
  Core& c = core();
  Launch& l = c.launch;
  std::unique_lock<std::mutex> lock(l.mutex);
  auto& arrived = l.arrived[c.index][flag];
  l.waiting[c.index] = flag;
  while (arrived.empty() && !l.aborted) {
    if (l.deadlocked()) {
      l.add_error(text(c.context(), "CrossCoreWaitFlag (", site.text(), "): flag ", flag,
                       " will never come: every core waits or has ended"));
      l.aborted = true;
      l.changed.notify_all();
    } else {
      l.changed.wait(lock);
    }
  }
  l.waiting.erase(c.index);
  if (l.aborted) throw Aborted();
  if (effective) c.wait(PIPE_S, arrived.front());
  arrived.pop_front();
}

}  // namespace ascend_twin

namespace AscendC {

inline int64_t GetBlockNum() { return ascend_twin::core().launch.blocks; }
inline int64_t GetSubBlockNum() { return ascend_twin::core().launch.sub_blocks; }
inline int64_t GetSubBlockIdx() { return ascend_twin::core().sub_block; }
inline int64_t GetTaskRatio() {
  return ascend_twin::core().kind == ascend_twin::CoreKind::kVector ? GetSubBlockNum() : 1;
}

// Of vector cores all of them are counted, of cube cores those.
inline int64_t GetBlockIdx() {
  const ascend_twin::Core& c = ascend_twin::core();
  return c.kind == ascend_twin::CoreKind::kCube ? c.block : c.block * c.launch.sub_blocks + c.sub_block;
}

template <HardEvent kEvent>
void SetFlag(int32_t id, ascend_twin::Site site = ascend_twin::Site::here()) {
  ascend_twin::Core& c = ascend_twin::core();
  const std::string what = ascend_twin::text("SetFlag (", site.text(), "): event ", id);
  if (id < 0 || id >= ascend_twin::kEventIds) ascend_twin::fail(what + " does not exist");
  if (c.flags.count({kEvent, id})) ascend_twin::fail(what + " is set already, by hand or by a queue");
  c.flags.emplace(std::pair(kEvent, id), c.after(ascend_twin::pipes_of(kEvent).source));
}

template <HardEvent kEvent>
void WaitFlag(int32_t id, ascend_twin::Site site = ascend_twin::Site::here()) {
  ascend_twin::Core& c = ascend_twin::core();
  if (!c.flags.count({kEvent, id})) {
    ascend_twin::fail(
        ascend_twin::text("WaitFlag (", site.text(), "): event ", id, " was not set, the core would hang"));
  }
  if (ascend_twin::syncs_at(site)) return ascend_twin::wait_flag(kEvent, id);
  c.flags.erase({kEvent, id});
}

template <pipe_t kPipe>
void PipeBarrier(ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(kPipe != PIPE_S, "the scalar pipe needs no barrier");
  if (!ascend_twin::syncs_at(site)) return;
  ascend_twin::Core& c = ascend_twin::core();
  if (kPipe == PIPE_ALL) return ascend_twin::barrier_all();
  c.wait(kPipe, c.after(kPipe));
}

// Mode 0: all cores of a kind. Mode 1: the vector cores of a block. Mode 2: the cube core and the vector cores of a
// block.
template <uint8_t kMode, pipe_t kPipe>
void CrossCoreSetFlag(uint16_t flag, ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(kMode <= 2, "dav-2201 has modes 0, 1 and 2");
  static_assert(kPipe != PIPE_S && kPipe != PIPE_ALL, "the flag follows one of the pipes that execute");
  if (flag >= ascend_twin::kCrossCoreFlags) {
    ascend_twin::fail(ascend_twin::text("CrossCoreSetFlag (", site.text(), "): flag ", flag,
                                        " is used by SyncAll or does not exist"));
  }
  ascend_twin::send_cross_core(kMode, flag, kPipe);
}

// Stops the core from issuing anything until the counter of the flag is above zero, and lowers it.
template <uint8_t kMode = 0, pipe_t kPipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t flag, ascend_twin::Site site = ascend_twin::Site::here()) {
  ascend_twin::receive_cross_core(flag, site, ascend_twin::syncs_at(site));
}

// All cores of a kernel that has only vector cores.
template <bool kIsAIVOnly = true>
void SyncAll(ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(kIsAIVOnly, "the twin synchronises vector cores only");
  constexpr int kFlag = 14;
  const bool effective = ascend_twin::syncs_at(site);
  ascend_twin::barrier_all();
  ascend_twin::send_cross_core(0, kFlag, PIPE_MTE3);
  ascend_twin::receive_cross_core(kFlag, site, effective);
}

// From here on copies to global memory add.
template <class T>
void SetAtomicAdd() {
  static_assert(std::is_same_v<T, float>, "the twin adds float only");
  ascend_twin::core().atomic_add = true;
}

inline void SetAtomicNone() { ascend_twin::core().atomic_add = false; }

}  // namespace AscendC

#define ASCEND_IS_AIC (ascend_twin::core().kind == ascend_twin::CoreKind::kCube)
#define ASCEND_IS_AIV (ascend_twin::core().kind == ascend_twin::CoreKind::kVector)
