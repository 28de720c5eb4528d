#include "chunk_sum.h"

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {

void chunk_sum_kernel(const ChunkSum& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    T* total = static_cast<T*>(args.total) + begin;
    const float* partial = args.partial + begin;
    for_each_vector(end - begin, [&](int64_t i, auto lanes) {
      Vec sum = {};
      for (int64_t chunk = 0; chunk < args.chunks; ++chunk) sum += load(partial + chunk * args.columns + i, lanes);
      store(total + i, sum, lanes);
    });
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
