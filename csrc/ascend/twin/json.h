// A report as JSON: what the launchers return to Python.
#pragma once

#include <cstdlib>
#include <cstring>

#include "core.h"

namespace ascend_twin {

inline std::string quoted(const std::string& raw) {
  std::string out = "\"";
  for (const char c : raw) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

template <class Items, class F>
std::string joined(const Items& items, F f) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + f(item);
  return out;
}

inline std::string to_json(const Report& report) {
  const Counters& c = report.counters;
  std::string counters =
      text("\"gm_read\": ", c.gm_read, ", \"gm_written\": ", c.gm_written, ", \"l1_read\": ", c.l1_read,
           ", \"vector_repeats\": ", c.vector_repeats, ", \"vector_critical\": ", c.vector_critical,
           ", \"cube_flops\": ", c.cube_flops, ", \"cube_flops_padded\": ", c.cube_flops_padded);
  for (int p = 0; p < kPipes; ++p) {
    counters += text(", \"instructions_", kPipeNames[p], "\": ", c.instructions[p]);
  }
  for (int m = 0; m < kMemories; ++m) counters += text(", \"peak_", kMemoryFacts[m].name, "\": ", c.peak[m]);
  const std::string queues = joined(report.queues, [](const auto& queue) {
    const auto& [site, use] = queue;
    return text(quoted(site), ": {\"buffers\": ", use.buffers, ", \"filled\": ", use.filled,
                ", \"overlapped\": ", use.overlapped, "}");
  });
  return text("{\"errors\": [", joined(report.errors, quoted), "], \"sync_sites\": [",
              joined(report.sync_sites, quoted), "], \"queues\": {", queues, "}, \"counters\": {", counters, "}}");
}

// For a caller that frees it with free().
inline char* to_c_string(const Report& report) { return strdup(to_json(report).c_str()); }

}  // namespace ascend_twin
