#include "cache.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace mindspeed::cpu {
namespace {

// The size of the first core's last-level cache. From sysfs: sysconf is wrong on virtual machines with AMD processors.
int64_t last_level_cache_bytes() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    int64_t size;
    char unit = 'B';
    if (!(file >> size)) break;
    file >> unit;
    largest = std::max(largest, size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0));
  }
  constexpr int64_t kUnknown = 32 << 20;
  return largest > 0 ? largest : kUnknown;
}

}  // namespace

bool writes_past_cache(int64_t bytes_touched) {
  static const int64_t cache_bytes = last_level_cache_bytes();
  return bytes_touched >= cache_bytes;
}

}  // namespace mindspeed::cpu
