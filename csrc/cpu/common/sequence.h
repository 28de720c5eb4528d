#pragma once

#include <cstdint>

namespace mindspeed::cpu {

// Tokens [begin, end) of the flattened batch.
struct Sequence {
  int64_t begin, end;
};

}  // namespace mindspeed::cpu
