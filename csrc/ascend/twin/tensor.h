// GlobalTensor and LocalTensor, and the instruction that accesses them: the place of every check of an access.
#pragma once

#include "core.h"

namespace ascend_twin {

inline Memory memory_of(AscendC::TPosition position) {
  using AscendC::TPosition;
  switch (position) {
    case TPosition::A1:
    case TPosition::B1:
      return kL1;
    case TPosition::A2:
      return kL0A;
    case TPosition::B2:
      return kL0B;
    case TPosition::CO1:
      return kL0C;
    default:
      return kUnifiedBuffer;
  }
}

class Instruction;

}  // namespace ascend_twin

namespace AscendC {

template <class T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* buffer, uint64_t size) { data_ = buffer, size_ = size; }
  void SetGlobalBuffer(T* buffer) { SetGlobalBuffer(buffer, ~uint64_t(0)); }

  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor rest;
    rest.SetGlobalBuffer(data_ + offset, size_ == ~uint64_t(0) ? size_ : size_ - std::min(size_, offset));
    return rest;
  }

  // A scalar load. There is no SetValue: a scalar store stays in the core's cache until that is flushed.
  T GetValue(uint64_t offset, ascend_twin::Site site = ascend_twin::Site::here()) const;

  const T* GetPhyAddr() const { return data_; }
  uint64_t GetSize() const { return size_; }

 private:
  friend class ascend_twin::Instruction;

  T* data_ = nullptr;
  uint64_t size_ = 0;  // elements; all bits set: unknown
};

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(ascend_twin::Buffer& buffer, TPosition position, uint32_t bytes)
      : buffer_(&buffer), generation_(buffer.generation), position_(position), offset_(buffer.offset), bytes_(bytes) {}

  LocalTensor operator[](uint32_t offset) const {
    if (offset * uint64_t(sizeof(T)) > bytes_) {
      ascend_twin::fail(ascend_twin::text("offset ", offset, " is past the end of a tensor of ", GetSize(),
                                          " elements in ", buffer_ ? buffer_->label : "no buffer"));
    }
    LocalTensor rest = *this;
    rest.offset_ += offset * sizeof(T);
    rest.bytes_ -= offset * sizeof(T);
    return rest;
  }

  uint32_t GetSize() const { return bytes_ / sizeof(T); }
  TPosition GetPosition() const { return position_; }

  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> same;
    same.buffer_ = buffer_, same.generation_ = generation_, same.position_ = position_;
    same.offset_ = offset_, same.bytes_ = bytes_;
    return same;
  }

  T GetValue(uint32_t offset, ascend_twin::Site site = ascend_twin::Site::here()) const;
  template <class U>
  void SetValue(uint32_t offset, U value, ascend_twin::Site site = ascend_twin::Site::here()) const;

 private:
  template <class U>
  friend class LocalTensor;
  template <TPosition, TPosition, int32_t, int>
  friend class TQueBind;
  friend class ascend_twin::Instruction;

  ascend_twin::Buffer* buffer_ = nullptr;
  uint32_t generation_ = 0;
  TPosition position_ = TPosition::VECCALC;
  uint32_t offset_ = 0, bytes_ = 0;  // within the core's memory
};

}  // namespace AscendC

namespace ascend_twin {

// One instruction on one pipe. read and write check an operand and return where its elements are.
class Instruction {
 public:
  Instruction(const char* name, pipe_t pipe, Site site) : core_(core()), name_(name), pipe_(pipe), site_(site) {
    ++core_.issued[pipe];
    ++core_.counters.instructions[pipe];
  }

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) fail(text(name_, " (", site_.text(), "): ", parts...));
  }

  void count_vector_work(uint64_t bytes) const {
    core_.counters.vector_repeats += (bytes + kRepeatBytes - 1) / kRepeatBytes;
  }

  template <class T>
  static bool same_start(const AscendC::LocalTensor<T>& a, const AscendC::LocalTensor<T>& b) {
    return a.buffer_ == b.buffer_ && a.offset_ == b.offset_;
  }

  // `count` elements from `first`. An operand whose alignment is 0 needs that of its memory. What was never written is
  // NaN: some instructions may copy it as long as nobody computes with it.
  template <class T>
  const T* read(const char* operand, const AscendC::LocalTensor<T>& tensor, uint64_t first, uint64_t count,
                uint32_t alignment = 0, bool may_be_unwritten = false) const {
    const Span span = check(operand, tensor, first, count, alignment);
    if (span.begin == span.end) return nullptr;
    core_.shadow[span.memory].read(
        span.begin, span.end, access(),
        [&](const Access& earlier, bool) { order(operand, span, earlier, true, false); },
        [&](uint64_t) {
          if (!may_be_unwritten) core_.report(text(where(operand, span), " was never written"));
        });
    return reinterpret_cast<const T*>(core_.bytes[span.memory].data() + span.begin);
  }

  template <class T>
  T* write(const char* operand, const AscendC::LocalTensor<T>& tensor, uint64_t first, uint64_t count,
           uint32_t alignment = 0) const {
    const Span span = check(operand, tensor, first, count, alignment);
    if (span.begin == span.end) return nullptr;
    core_.shadow[span.memory].write(span.begin, span.end, access(), [&](const Access& earlier, bool wrote) {
      order(operand, span, earlier, wrote, true);
    });
    return reinterpret_cast<T*>(core_.bytes[span.memory].data() + span.begin);
  }

  template <class T>
  const T* read(const char* operand, const AscendC::GlobalTensor<T>& tensor, uint64_t first, uint64_t count) const {
    if (count == 0) return nullptr;
    const GlobalBuffer& buffer = check(operand, tensor, first, count);
    core_.counters.gm_read += count * sizeof(T);
    const uint64_t begin = reinterpret_cast<uint64_t>(tensor.data_ + first);
    if (buffer.use != Use::kInput) {
      const std::lock_guard<std::mutex> lock(core_.launch.mutex);
      core_.launch.global.read(
          begin, begin + count * sizeof(T), access(),
          [&](const Access& earlier, bool) { order(operand, buffer, earlier, true, false); },
          [&](uint64_t) {
            if (buffer.use == Use::kInOut) return;
            core_.launch.add_error(text(core_.context(), here(), operand, " in ", buffer.name, " was never written"));
          });
    }
    return tensor.data_ + first;
  }

  // Stores `values`, or adds them where atomic addition is on.
  template <class T>
  void store(const char* operand, const AscendC::GlobalTensor<T>& tensor, uint64_t first, const T* values,
             uint64_t count) const {
    if (count == 0) return;
    const GlobalBuffer& buffer = check(operand, tensor, first, count);
    require(buffer.use != Use::kInput, operand, " is in ", buffer.name, ", which is an input");
    core_.counters.gm_written += count * sizeof(T);
    const uint64_t begin = reinterpret_cast<uint64_t>(tensor.data_ + first);
    const std::lock_guard<std::mutex> lock(core_.launch.mutex);
    Access write = access();
    write.atomic = core_.atomic_add;
    core_.launch.global.write(begin, begin + count * sizeof(T), write,
                              [&](const Access& earlier, bool wrote) { order(operand, buffer, earlier, wrote, true); });
    T* out = tensor.data_ + first;
    for (uint64_t i = 0; i < count; ++i) out[i] = core_.atomic_add ? T(out[i] + values[i]) : values[i];
  }

 private:
  struct Span {
    Memory memory;
    uint64_t begin, end;
  };

  Access access() const { return {core_.agent(pipe_), core_.issued[pipe_], name_, site_}; }
  std::string here() const { return text(name_, " (", site_.text(), "): "); }

  std::string where(const char* operand, const Span& span) const {
    const Buffer* buffer = core_.buffer_at(span.memory, span.begin);
    return text(here(), operand, " at ", kMemoryFacts[span.memory].name, "+", span.begin, " in ",
                buffer ? buffer->label : "no buffer");
  }

  template <class T>
  Span check(const char* operand, const AscendC::LocalTensor<T>& tensor, uint64_t first, uint64_t count,
             uint32_t alignment) const {
    require(tensor.buffer_ != nullptr, operand, " is a tensor without a buffer");
    const Buffer& buffer = *tensor.buffer_;
    const bool current = buffer.state == Buffer::kPlain ||
                         (buffer.state == Buffer::kAllocated && buffer.generation == tensor.generation_);
    require(current, operand, " in ", buffer.label, " is used after FreeTensor or EnQue");
    require((first + count) * sizeof(T) <= tensor.bytes_, operand, " needs elements ", first, " to ", first + count,
            ", but the tensor in ", buffer.label, " has ", tensor.GetSize());
    const Span span{buffer.memory, tensor.offset_ + first * sizeof(T), tensor.offset_ + (first + count) * sizeof(T)};
    if (alignment == 0) alignment = kMemoryFacts[buffer.memory].alignment;
    require(tensor.offset_ % alignment == 0, operand, " at ", kMemoryFacts[span.memory].name, "+", tensor.offset_,
            " in ", buffer.label, " is not aligned to ", alignment, " bytes");
    return span;
  }

  template <class T>
  const GlobalBuffer& check(const char* operand, const AscendC::GlobalTensor<T>& tensor, uint64_t first,
                            uint64_t count) const {
    require(tensor.size_ == ~uint64_t(0) || first + count <= tensor.size_, operand, " needs elements ", first, " to ",
            first + count, ", but SetGlobalBuffer gave ", tensor.size_);
    const uint64_t begin = reinterpret_cast<uint64_t>(tensor.data_ + first), end = begin + count * sizeof(T);
    for (const GlobalBuffer& buffer : core_.launch.buffers) {
      if (begin >= buffer.begin() && end <= buffer.end()) return buffer;
    }
    for (const GlobalBuffer& buffer : core_.launch.buffers) {
      require(end <= buffer.begin() || begin >= buffer.end(), operand, " reaches from byte ",
              int64_t(begin - buffer.begin()), " to ", int64_t(end - buffer.begin()), " of ", buffer.name,
              ", which has ", buffer.bytes, " bytes");
    }
    require(false, operand, " is outside of every argument of the kernel");
    throw Aborted();  // not reached
  }

  std::string conflict(const Access& earlier, bool earlier_wrote, bool writes) const {
    return text(
        writes ? " is written" : " is read", " on pipe ", kPipeNames[pipe_], " while ", earlier.instruction, " (",
        earlier.site.text(), ") on pipe ", kPipeNames[earlier.agent % kPipes],
        earlier.agent / kPipes == core_.index ? "" : text(" of ", core_.launch.core_names[earlier.agent / kPipes]),
        earlier_wrote ? " may still be writing it" : " may still be reading it",
        ": a flag, barrier or queue is missing between them");
  }

  void order(const char* operand, const Span& span, const Access& earlier, bool earlier_wrote, bool writes) const {
    if (core_.happened_before(earlier, pipe_)) return;
    core_.report(where(operand, span) + conflict(earlier, earlier_wrote, writes));
  }

  // With the launch's mutex held.
  void order(const char* operand, const GlobalBuffer& buffer, const Access& earlier, bool earlier_wrote,
             bool writes) const {
    if (core_.happened_before(earlier, pipe_)) return;
    core_.launch.add_error(
        text(core_.context(), here(), operand, " in ", buffer.name, conflict(earlier, earlier_wrote, writes)));
  }

  Core& core_;
  const char* name_;
  pipe_t pipe_;
  Site site_;
};

}  // namespace ascend_twin

namespace AscendC {

template <class T>
T GlobalTensor<T>::GetValue(uint64_t offset, ascend_twin::Site site) const {
  return *ascend_twin::Instruction("GlobalTensor::GetValue", PIPE_S, site).read("tensor", *this, offset, 1);
}

template <class T>
T LocalTensor<T>::GetValue(uint32_t offset, ascend_twin::Site site) const {
  return *ascend_twin::Instruction("LocalTensor::GetValue", PIPE_S, site).read("tensor", *this, offset, 1, sizeof(T));
}

template <class T>
template <class U>
void LocalTensor<T>::SetValue(uint32_t offset, U value, ascend_twin::Site site) const {
  *ascend_twin::Instruction("LocalTensor::SetValue", PIPE_S, site).write("tensor", *this, offset, 1, sizeof(T)) =
      T(value);
}

}  // namespace AscendC
