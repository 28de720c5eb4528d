// Which sample of which data set comes when: the parts of a data order that are too slow in Python.
#pragma once

#include <cstdint>
#include <random>

namespace mindspeed::data {

// The generator behind numpy.random.RandomState(seed), and its shuffle.
class RandomState {
 public:
  explicit RandomState(uint32_t seed) : random_(seed) {}

  // Puts the values into the order in which RandomState.shuffle would put them.
  template <class T>
  void shuffle(T* values, int64_t size);

 private:
  int64_t below(int64_t limit);

  std::mt19937 random_;
};

// starts[i] = tokens of the documents before the i-th of the order, starts[count] those of all. [count + 1]
void accumulate_lengths(const int32_t* lengths, const int32_t* order, int64_t count, int64_t* starts);

// Fills `dataset` and `sample` [size] so that after every sample each of the data sets has contributed as closely to
// its weight as can be; the samples of a data set come in their own order. With `limits` a data set is left out once it
// has contributed that many. The arithmetic, and with it the order, is that of Megatron-core's BlendedDataset.
void blend(const double* weights, const int64_t* limits, int64_t data_sets, int64_t size, int16_t* dataset,
           int64_t* sample);

}  // namespace mindspeed::data
