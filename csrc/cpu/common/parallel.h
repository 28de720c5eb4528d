// Kernels on several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "dispatch.h"

namespace mindspeed::cpu {

// Runs the kernel over the items [0, count), each of about `elements_per_item` elements, on PyTorch's threads. Each
// thread gets a run of neighbouring items: a kernel whose items are independent gives the same result on any number.
template <class Arguments>
void run_parallel(const KernelTable<Arguments>& kernel, int64_t count, int64_t elements_per_item,
                  const Arguments& arguments) {
  constexpr int64_t kMinElements = 16384;  // waking a thread costs more than it saves below
  const int64_t grain = std::max<int64_t>(1, kMinElements / std::max<int64_t>(1, elements_per_item));
  Kernel<Arguments>& run = *kernel;
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    run(arguments, begin, end);
#ifdef MINDSPEED_X86
    __builtin_ia32_sfence();  // stores past the cache are not ordered: finish them before the threads meet
#endif
  });
}

}  // namespace mindspeed::cpu
