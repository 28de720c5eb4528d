#include "moe_permute.h"

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// The rows of one token's assignments that some expert computed, and their weights.
template <class T>
struct Terms {
  const T* rows[kMaxTopK];
  float weights[kMaxTopK];
  int count = 0;

  Terms(const MoeUnpermute& args, int64_t token) {
    for (int64_t a = token * args.top_k; a < (token + 1) * args.top_k; ++a) {
      if (args.position[a] < 0) continue;
      rows[count] = row<T>(args.y, args.position[a]);
      weights[count++] = args.weights == nullptr ? 1.0f : args.weights[a];
    }
  }
};

}  // namespace

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
      const Terms<T> terms(args, t), next(args, t + 1 < end ? t + 1 : t);
      T* out = row<T>(args.out, t);
      for_each_vector(args.hidden, [&](int64_t i, auto lanes) {
        Vec sum = {};
        for (int j = 0; j < next.count; ++j) prefetch(next.rows[j] + i);
        for (int j = 0; j < terms.count; ++j) sum += load(terms.rows[j] + i, lanes) * terms.weights[j];
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
      const auto differentiate = [&](int64_t i, auto lanes) {
        const Vec gradient = load(grad + i, lanes);
        store(grad_y + i, gradient * weight, lanes, args.grad_y.past_cache);
        return gradient;
      };
      if (args.grad_weights == nullptr) {
        for_each_vector(args.hidden, differentiate);
        continue;
      }
      const T* y = row<T>(args.y, position);
      const int64_t next = a + 1 < end * args.top_k ? args.position[a + 1] : -1;
      const T* next_y = next < 0 ? y : row<T>(args.y, next);
      args.grad_weights[a] = sum_over(args.hidden, [&](int64_t i, auto lanes) {
        prefetch(next_y + i);
        return differentiate(i, lanes) * load(y + i, lanes);
      });
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
