// Kernels on several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "dispatch.h"

#ifdef __SANITIZE_THREAD__
#include <thread>
#include <vector>
#endif

namespace mindspeed::cpu {

#ifdef __SANITIZE_THREAD__

// ThreadSanitizer does not see OpenMP's threads wait for one another and would call that a race, so its builds have
// threads of their own; and they share even small work, so that the tests' small tensors are worth a look.
inline int64_t num_threads() { return 4; }

template <class F>
void parallel_for(int64_t count, int64_t /*grain*/, const F& f) {
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < num_threads(); ++thread) {
    const int64_t begin = count * thread / num_threads(), end = count * (thread + 1) / num_threads();
    if (begin < end) threads.emplace_back([&f, begin, end] { f(begin, end); });
  }
  for (std::thread& thread : threads) thread.join();
}

#else

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

// Calls f(begin, end) on PyTorch's threads, for neighbouring runs of at least `grain` that make up [0, count).
template <class F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  torch::stable::parallel_for(0, count, grain, f);
}

#endif

// Runs the kernel over the items [0, count), each of about `elements_per_item` elements, on PyTorch's threads. Each
// thread gets a run of neighbouring items: a kernel whose items are independent gives the same result on any number.
template <class Arguments>
void run_parallel(const KernelTable<Arguments>& kernel, int64_t count, int64_t elements_per_item,
                  const Arguments& arguments) {
  constexpr int64_t kMinElements = 16384;  // waking a thread costs more than it saves below
  const int64_t grain = std::max<int64_t>(1, kMinElements / std::max<int64_t>(1, elements_per_item));
  Kernel<Arguments>& run = *kernel;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
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
  const int64_t threads = std::min(count, num_threads());
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(arguments, i, i + 1);
  });
}

}  // namespace mindspeed::cpu
