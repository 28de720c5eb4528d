// Kernels on several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
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

// The same for large items of unequal cost: a thread takes the next one whenever it has finished one.
template <class Arguments>
void run_dynamic(const KernelTable<Arguments>& kernel, int64_t count, const Arguments& arguments) {
  Kernel<Arguments>& run = *kernel;
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(arguments, i, i + 1);
  });
}

}  // namespace mindspeed::cpu
