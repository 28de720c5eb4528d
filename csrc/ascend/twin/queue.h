// TPipe hands out local memory; TQue passes buffers from the pipe that fills them to the one that empties them, and the
// flags between the two with them; TBuf is memory without a queue.
#pragma once

#include "tensor.h"

namespace ascend_twin {

// The flags of a queue: `filled` from EnQue to DeQue, `emptied` from FreeTensor to the next AllocTensor.
struct QueueEvents {
  AscendC::HardEvent filled, emptied;
};

constexpr QueueEvents queue_events(AscendC::TPosition source, AscendC::TPosition destination) {
  using AscendC::HardEvent;
  using AscendC::TPosition;
  if (source != destination) return {HardEvent::MTE2_MTE3, HardEvent::MTE3_MTE2};
  switch (source) {
    case TPosition::VECIN:
      return {HardEvent::MTE2_V, HardEvent::V_MTE2};
    case TPosition::VECOUT:
      return {HardEvent::V_MTE3, HardEvent::MTE3_V};
    case TPosition::A1:
    case TPosition::B1:
      return {HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2};
    case TPosition::A2:
    case TPosition::B2:
      return {HardEvent::MTE1_M, HardEvent::M_MTE1};
    default:
      return {HardEvent::M_FIX, HardEvent::FIX_M};
  }
}

// Sets a flag under an identifier that is free; the hardware has eight for each pair of pipes.
inline int set_free_flag(AscendC::HardEvent event) {
  Core& c = core();
  for (int id = 0; id < kEventIds; ++id) {
    const auto flag = std::pair(event, id);
    if (c.flags.count(flag) || c.reserved_events.count(flag)) continue;
    c.flags.emplace(flag, c.after(pipes_of(event).source));
    return id;
  }
  fail(text("no event identifier is free from pipe ", kPipeNames[pipes_of(event).source], " to pipe ",
            kPipeNames[pipes_of(event).destination], ": queues and flags hold all ", kEventIds));
}

inline void wait_flag(AscendC::HardEvent event, int id) {
  Core& c = core();
  const auto flag = c.flags.find({event, id});
  c.wait(pipes_of(event).destination, flag->second);
  c.flags.erase(flag);
}

// New memory for a buffer.
inline Buffer& add_buffer(AscendC::TPosition position, uint32_t bytes, Site site, const std::string& what) {
  Core& c = core();
  const Memory memory = memory_of(position);
  const MemoryFacts facts = kMemoryFacts[memory];
  const bool vector_memory = memory == kUnifiedBuffer;
  if (vector_memory != (c.kind == CoreKind::kVector)) {
    fail(text("InitBuffer (", site.text(), "): a ", vector_memory ? "cube" : "vector", " core has no ", facts.name));
  }
  const uint32_t offset = (c.used[memory] + facts.alignment - 1) / facts.alignment * facts.alignment;
  if (bytes == 0) fail(text("InitBuffer (", site.text(), "): a buffer of 0 bytes"));
  if (uint64_t(offset) + bytes > facts.bytes) {
    fail(text("InitBuffer (", site.text(), "): ", facts.name, " has ", facts.bytes, " bytes, of which ", c.used[memory],
              " are taken: ", bytes, " more do not fit"));
  }
  if (c.buffers.size() == kMaxBuffers) {
    fail(text("InitBuffer (", site.text(), "): more than ", kMaxBuffers, " buffers"));
  }
  if (c.bytes[memory].empty()) c.bytes[memory].assign(facts.bytes, 0xff);  // NaN in every format
  c.used[memory] = offset + bytes;
  c.counters.peak[memory] = std::max<uint64_t>(c.counters.peak[memory], c.used[memory]);
  c.buffers.push_back(std::make_unique<Buffer>());
  Buffer& buffer = *c.buffers.back();
  buffer.memory = memory, buffer.position = position, buffer.offset = offset, buffer.bytes = bytes;
  buffer.label = text(what, " from InitBuffer (", site.text(), ")");
  return buffer;
}

}  // namespace ascend_twin

namespace AscendC {

using TEventID = int8_t;

// A queue between the pipes that fill and empty buffers at kPosition, or, for copies in and out of the same buffer,
// from VECIN to VECOUT.
template <TPosition kPosition, TPosition kDestination, int32_t kDepth, int kMask = 0>
class TQueBind {
  static_assert(kPosition == kDestination || (kPosition == TPosition::VECIN && kDestination == TPosition::VECOUT),
                "the twin binds VECIN to VECOUT only");

 public:
  template <class T>
  LocalTensor<T> AllocTensor(ascend_twin::Site site = ascend_twin::Site::here()) {
    check_position(site);
    for (size_t i = 0; i < buffers_.size(); ++i) {
      ascend_twin::Buffer* buffer = buffers_[cursor_];
      cursor_ = (cursor_ + 1) % buffers_.size();
      if (buffer->state != ascend_twin::Buffer::kFree) continue;
      if (buffer->freed_event >= 0) ascend_twin::wait_flag(kEvents.emptied, buffer->freed_event);
      buffer->state = ascend_twin::Buffer::kAllocated;
      ++buffer->generation;
      return LocalTensor<T>(*buffer, kPosition, buffer->bytes);
    }
    ascend_twin::fail(ascend_twin::text("AllocTensor (", site.text(), "): all ", buffers_.size(),
                                        " buffers of the queue are in use: FreeTensor is missing"));
  }

  template <class T>
  bool EnQue(const LocalTensor<T>& tensor, ascend_twin::Site site = ascend_twin::Site::here()) {
    ascend_twin::Buffer& buffer = owned(tensor, "EnQue", site);
    if (int(queued_.size()) >= kDepth) {
      ascend_twin::fail(ascend_twin::text("EnQue (", site.text(), "): the queue is full, its depth is ", kDepth));
    }
    buffer.state = ascend_twin::Buffer::kQueued;
    buffer.enqueued_event = ascend_twin::set_free_flag(kEvents.filled);
    queued_.push_back(&buffer);
    note_filled(buffer);
    return true;
  }

  template <class T>
  LocalTensor<T> DeQue(ascend_twin::Site site = ascend_twin::Site::here()) {
    if (queued_.empty()) ascend_twin::fail(ascend_twin::text("DeQue (", site.text(), "): the queue is empty"));
    ascend_twin::Buffer& buffer = *queued_.front();
    queued_.pop_front();
    ascend_twin::wait_flag(kEvents.filled, buffer.enqueued_event);
    buffer.taken = true, buffer.taken_at = ascend_twin::core().issued[kEnds.destination];
    buffer.state = ascend_twin::Buffer::kAllocated;
    ++buffer.generation;
    return LocalTensor<T>(buffer, kPosition, buffer.bytes);
  }

  template <class T>
  void FreeTensor(LocalTensor<T>& tensor, ascend_twin::Site site = ascend_twin::Site::here()) {
    ascend_twin::Buffer& buffer = owned(tensor, "FreeTensor", site);
    buffer.state = ascend_twin::Buffer::kFree;
    buffer.freed_event = ascend_twin::set_free_flag(kEvents.emptied);
  }

 private:
  friend class TPipe;

  static constexpr ascend_twin::QueueEvents kEvents = ascend_twin::queue_events(kPosition, kDestination);
  static constexpr ascend_twin::EventPipes kEnds = ascend_twin::pipes_of(kEvents.filled);

  // Counts a buffer that was filled, and whether this could happen while the one before it was emptied.
  void note_filled(ascend_twin::Buffer& buffer) {
    const ascend_twin::Core& c = ascend_twin::core();
    ++use_->filled;
    if (last_filled_ != nullptr && last_filled_ != &buffer) {
      const uint64_t known = c.clocks[kEnds.source][c.agent(kEnds.destination)];
      use_->overlapped += !last_filled_->taken || known <= last_filled_->taken_at;
    }
    buffer.taken = false;
    last_filled_ = &buffer;
  }

  // At most eight tensors of one position may be out at once, in all queues together.
  void check_position(ascend_twin::Site site) const {
    int taken = 0;
    for (const auto& buffer : ascend_twin::core().buffers) {
      taken += buffer->state == ascend_twin::Buffer::kAllocated && buffer->position == kPosition;
    }
    if (taken >= ascend_twin::kEventIds) {
      ascend_twin::fail(ascend_twin::text("AllocTensor (", site.text(), "): more than ", ascend_twin::kEventIds,
                                          " tensors of one position at once"));
    }
  }

  template <class T>
  ascend_twin::Buffer& owned(const LocalTensor<T>& tensor, const char* name, ascend_twin::Site site) const {
    const auto found = std::find(buffers_.begin(), buffers_.end(), tensor.buffer_);
    if (found == buffers_.end()) {
      ascend_twin::fail(ascend_twin::text(name, " (", site.text(), "): the tensor is not from this queue"));
    }
    if ((*found)->state != ascend_twin::Buffer::kAllocated || (*found)->generation != tensor.generation_) {
      ascend_twin::fail(ascend_twin::text(name, " (", site.text(), "): the tensor in ", (*found)->label,
                                          " is free, queued or out of date"));
    }
    return **found;
  }

  std::vector<ascend_twin::Buffer*> buffers_;
  size_t cursor_ = 0;  // of the buffer to try first: they are used in turn
  std::deque<ascend_twin::Buffer*> queued_;
  ascend_twin::Buffer* last_filled_ = nullptr;
  ascend_twin::QueueUse* use_ = nullptr;
};

template <TPosition kPosition, int32_t kDepth, int kMask = 0>
class TQue : public TQueBind<kPosition, kPosition, kDepth, kMask> {};

template <TPosition kPosition = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() {
    return GetWithOffset<T>(buffer_ ? buffer_->bytes / sizeof(T) : 0, 0);
  }

  template <class T>
  LocalTensor<T> Get(uint32_t size) {
    return GetWithOffset<T>(size, 0);
  }

  // `size` elements from byte `offset`.
  template <class T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t offset) {
    if (!buffer_) ascend_twin::fail("TBuf::Get before InitBuffer");
    if (offset + uint64_t(size) * sizeof(T) > buffer_->bytes) {
      ascend_twin::fail(ascend_twin::text("TBuf::Get: ", size, " elements from byte ", offset, " of ", buffer_->label,
                                          ", which has ", buffer_->bytes, " bytes"));
    }
    return LocalTensor<T>(*buffer_, kPosition, buffer_->bytes)
        .template ReinterpretCast<uint8_t>()[offset]
        .template ReinterpretCast<T>();
  }

 private:
  friend class TPipe;

  ascend_twin::Buffer* buffer_ = nullptr;
};

class TPipe {
 public:
  template <TPosition kPosition, TPosition kDestination, int32_t kDepth, int kMask>
  bool InitBuffer(TQueBind<kPosition, kDestination, kDepth, kMask>& queue, uint8_t count, uint32_t bytes,
                  ascend_twin::Site site = ascend_twin::Site::here()) {
    bytes = (bytes + ascend_twin::kBlockBytes - 1) / ascend_twin::kBlockBytes * ascend_twin::kBlockBytes;
    const int limit = ascend_twin::core().launch.options.max_buffers;
    if (limit > 0) count = uint8_t(std::min<int>(count, limit));
    queue.use_ = &ascend_twin::core().queues[site.text()];
    queue.use_->buffers = count;
    for (int i = 0; i < count; ++i) {
      const std::string what = ascend_twin::text("buffer ", i + 1, " of ", int(count), " of the queue");
      queue.buffers_.push_back(&ascend_twin::add_buffer(kPosition, bytes, site, what));
      queue.buffers_.back()->emptied = ascend_twin::queue_events(kPosition, kDestination).emptied;
    }
    return true;
  }

  template <TPosition kPosition>
  bool InitBuffer(TBuf<kPosition>& buffer, uint32_t bytes, ascend_twin::Site site = ascend_twin::Site::here()) {
    bytes = (bytes + ascend_twin::kBlockBytes - 1) / ascend_twin::kBlockBytes * ascend_twin::kBlockBytes;
    buffer.buffer_ = &ascend_twin::add_buffer(kPosition, bytes, site, "the TBuf");
    buffer.buffer_->state = ascend_twin::Buffer::kPlain;
    return true;
  }

  // An identifier that no queue will take until it is released.
  template <HardEvent kEvent>
  TEventID AllocEventID() {
    const TEventID id = FetchEventID(kEvent);
    ascend_twin::core().reserved_events.insert({kEvent, id});
    return id;
  }

  template <HardEvent kEvent>
  void ReleaseEventID(TEventID id) {
    if (!ascend_twin::core().reserved_events.erase({kEvent, id})) {
      ascend_twin::fail(ascend_twin::text("ReleaseEventID: ", int(id), " was not allocated"));
    }
  }

  // An identifier that is free now.
  TEventID FetchEventID(HardEvent event) {
    const ascend_twin::Core& c = ascend_twin::core();
    for (int id = 0; id < ascend_twin::kEventIds; ++id) {
      if (!c.flags.count({event, id}) && !c.reserved_events.count({event, id})) return id;
    }
    ascend_twin::fail("FetchEventID: no event identifier is free");
  }
};

}  // namespace AscendC
