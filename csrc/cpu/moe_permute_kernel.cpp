#include "moe_permute.h"

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {

void moe_permute_kernel(const MoePermute& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t r = begin; r < end; ++r) {
      T* sorted = row<T>(args.sorted, r);
      if (args.source[r] < 0) {
        __builtin_memset(sorted, 0, args.hidden * sizeof(T));
        continue;
      }
      const T* x = row<T>(args.x, args.source[r] / args.top_k);
      for_each_vector(args.hidden, [&](int64_t i, auto lanes) {
        store(sorted + i, load(x + i, lanes), lanes, args.sorted.past_cache);
      });
    }
  });
}

void moe_unpermute_kernel(const MoeUnpermute& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t t = begin; t < end; ++t) {
      const T* terms[kMaxTopK];
      float weights[kMaxTopK];
      int count = 0;
      for (int64_t a = t * args.top_k; a < (t + 1) * args.top_k; ++a) {
        if (args.position[a] < 0) continue;
        terms[count] = row<T>(args.y, args.position[a]);
        weights[count++] = args.weights == nullptr ? 1.0f : args.weights[a];
      }
      T* out = row<T>(args.out, t);
      for_each_vector(args.hidden, [&](int64_t i, auto lanes) {
        Vec sum = {};
        for (int j = 0; j < count; ++j) sum += load(terms[j] + i, lanes) * weights[j];
        store(out + i, sum, lanes, args.out.past_cache);
      });
    }
  });
}

void moe_unpermute_backward_kernel(const MoeUnpermuteBackward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t a = begin * args.top_k; a < end * args.top_k; ++a) {
      const int64_t position = args.position[a];
      if (position < 0) {
        if (args.grad_weights != nullptr) args.grad_weights[a] = 0.0f;
        continue;
      }
      const T* grad = row<T>(args.grad, a / args.top_k);
      T* grad_y = row<T>(args.grad_y, position);
      const float weight = args.weights == nullptr ? 1.0f : args.weights[a];
      for_each_vector(args.hidden, [&](int64_t i, auto lanes) {
        store(grad_y + i, load(grad + i, lanes) * weight, lanes, args.grad_y.past_cache);
      });
      if (args.grad_weights != nullptr) {
        const T* y = row<T>(args.y, position);
        args.grad_weights[a] =
            sum_over(args.hidden, [&](int64_t i, auto lanes) { return load(grad + i, lanes) * load(y + i, lanes); });
      }
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
