// When outputs should not go through the cache.
#pragma once

#include <cstdint>

namespace mindspeed::cpu {

// Whether an operator that reads and writes this many bytes in all should write past the cache. Where they exceed the
// last level, the first outputs would be evicted before anybody reads them, and an ordinary store first reads its line.
bool writes_past_cache(int64_t bytes_touched);

}  // namespace mindspeed::cpu
