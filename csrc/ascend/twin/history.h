// What happened before what: vector clocks, and for every byte who wrote and read it last.
//
// Every pipe of every core is an agent that counts its instructions. A clock says, for each agent, up to which of its
// instructions all is known to be finished. Flags, barriers and queues pass clocks on. Two accesses to a byte, one of
// them a write, conflict unless the earlier one is in the clock of the later one's agent (Lamport 1978, Mattern 1989).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ascend_twin {

// A place in the kernel's source.
struct Site {
  const char* file = "";
  int line = 0;

  // As a default argument it is where the function that has it is called.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

  std::string text() const {
    const std::string path = file;
    return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(line);
  }
};

class Clock {
 public:
  Clock() = default;
  explicit Clock(int agents) : times_(agents) {}

  uint64_t operator[](int agent) const { return times_[agent]; }
  void advance(int agent, uint64_t time) { times_[agent] = std::max(times_[agent], time); }
  void join(const Clock& other) {
    for (size_t i = 0; i < times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<uint64_t> times_;
};

// One instruction's access to memory.
struct Access {
  int agent;
  uint64_t time;
  const char* instruction;
  Site site;
  bool atomic = false;  // atomic additions do not conflict with each other
};

// The last accesses to the bytes of a memory, kept for runs of bytes that share them.
class Shadow {
 public:
  // on_conflict(earlier, earlier_was_write) is called for what the access has to be ordered with, on_unwritten(byte)
  // where it reads what nobody wrote.
  template <class OnConflict, class OnUnwritten>
  void read(uint64_t begin, uint64_t end, const Access& access, OnConflict on_conflict, OnUnwritten on_unwritten) {
    for_each_run(begin, end, [&](uint64_t first, Run& run) {
      if (run.written)
        on_conflict(run.writer, true);
      else
        on_unwritten(first);
      run.note_reader(access);
    });
  }

  template <class OnConflict>
  void write(uint64_t begin, uint64_t end, const Access& access, OnConflict on_conflict) {
    for_each_run(begin, end, [&](uint64_t, Run& run) {
      if (run.written && !(access.atomic && run.writer.atomic)) on_conflict(run.writer, true);
      for (const Access& reader : run.readers) on_conflict(reader, false);
    });
    runs_.erase(runs_.find(begin), runs_.lower_bound(end));
    runs_[begin] = Run{end, true, access, {}};
  }

  // The first byte that was never written, or `end`.
  uint64_t first_unwritten(uint64_t begin, uint64_t end) {
    uint64_t unwritten = end;
    for_each_run(begin, end, [&](uint64_t first, Run& run) {
      if (!run.written) unwritten = std::min(unwritten, first);
    });
    return unwritten;
  }

 private:
  struct Run {
    uint64_t end;
    bool written = false;
    Access writer{};
    std::vector<Access> readers;  // of each agent the last one, and the last of an instruction before that

    void note_reader(const Access& access) {
      const auto same_agent = [&](const Access& reader) { return reader.agent == access.agent; };
      const auto first = std::find_if(readers.begin(), readers.end(), same_agent);
      if (first == readers.end()) return readers.push_back(access);
      const auto second = std::find_if(first + 1, readers.end(), same_agent);
      const auto last = second == readers.end() ? first : second;
      if (last->time == access.time) return;
      // An instruction that works in place has read before it writes: that must not hide who read before it.
      if (second != readers.end()) readers.erase(first);
      readers.push_back(access);
    }
  };

  // Lets a run begin at `at` if `at` lies within one.
  void split(uint64_t at) {
    auto after = runs_.upper_bound(at);
    if (after == runs_.begin()) return;
    auto& [begin, run] = *std::prev(after);
    if (begin == at || run.end <= at) return;
    Run second = run;
    run.end = at;
    runs_.emplace(at, std::move(second));
  }

  template <class F>
  void for_each_run(uint64_t begin, uint64_t end, F f) {
    split(begin);
    split(end);
    for (uint64_t at = begin; at < end;) {
      auto run = runs_.lower_bound(at);
      if (run == runs_.end() || run->first > at) {  // never accessed until the next run
        const uint64_t gap_end = run == runs_.end() ? end : std::min(end, run->first);
        run = runs_.emplace(at, Run{gap_end, false, {}, {}}).first;
      }
      f(at, run->second);
      at = run->second.end;
    }
  }

  std::map<uint64_t, Run> runs_;  // by their first byte; they do not overlap
};

}  // namespace ascend_twin
