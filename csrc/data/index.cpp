#include "data/index.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace mindspeed::data {

namespace {

constexpr int64_t kAhead = 64;  // swaps whose memory is fetched before the first of them is made

}  // namespace

int64_t RandomState::below(int64_t limit) {
  uint64_t mask = static_cast<uint64_t>(limit);
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  const bool is_wide = static_cast<uint64_t>(limit) > std::numeric_limits<uint32_t>::max();
  uint64_t value;
  do {
    value = random_();
    if (is_wide) value = (value << 32) | random_();
    value &= mask;
  } while (value > static_cast<uint64_t>(limit));
  return static_cast<int64_t>(value);
}

template <class T>
void RandomState::shuffle(T* values, int64_t size) {
  // Fisher-Yates from the end. Partners do not depend on the values, so they are drawn a block ahead: the swaps then
  // wait for memory together instead of one after the other.
  int64_t partners[kAhead];
  for (int64_t last = size - 1; last > 0; last -= kAhead) {
    const int64_t count = std::min(kAhead, last);
    for (int64_t i = 0; i < count; ++i) {
      partners[i] = below(last - i);
      __builtin_prefetch(values + partners[i], 1);
    }
    for (int64_t i = 0; i < count; ++i) std::swap(values[last - i], values[partners[i]]);
  }
}

template void RandomState::shuffle(int32_t*, int64_t);
template void RandomState::shuffle(int64_t*, int64_t);

void accumulate_lengths(const int32_t* lengths, const int32_t* order, int64_t count, int64_t* starts) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(lengths + order[i + kAhead]);
    starts[i] = total;
    total += lengths[order[i]];
  }
  starts[count] = total;
}

void blend(const double* weights, const int64_t* limits, int64_t data_sets, int64_t size, int16_t* dataset,
           int64_t* sample) {
  std::vector<int64_t> taken(data_sets, 0);
  for (int64_t position = 0; position < size; ++position) {
    const double share = std::max(static_cast<double>(position), 1.0);
    int64_t next = -1;
    double largest = std::numeric_limits<double>::lowest();
    for (int64_t i = 0; i < data_sets; ++i) {
      if (limits && taken[i] == limits[i]) continue;
      const double missing = weights[i] * share - static_cast<double>(taken[i]);
      if (missing > largest) {
        largest = missing;
        next = i;
      }
    }
    dataset[position] = static_cast<int16_t>(next);
    sample[position] = taken[next]++;
  }
}

}  // namespace mindspeed::data
