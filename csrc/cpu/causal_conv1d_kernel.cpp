#include "causal_conv1d.h"

#include <algorithm>

#include "common/float_buffer.h"
#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Channels at a time: so few that the rows which tokens share stay in the first-level cache.
constexpr int64_t kStrip = 512;

// pre[t, c ...] of a token that is in a sequence.
template <class T, class Lanes>
Vec convolve(const CausalConv1d& problem, int64_t token, int64_t c, Lanes lanes) {
  Vec pre = load(problem.bias + c, lanes);
  for (int64_t d = 0; d <= problem.reach[token]; ++d)
    pre += load(problem.weight + d * problem.channels + c, lanes) * load(row<T>(problem.x, token - d) + c, lanes);
  return pre;
}

// The gradients of one strip of channels in one chunk of tokens.
template <class T>
class BackwardStrip {
 public:
  BackwardStrip(const CausalConv1dBackward& args, int64_t chunk, int64_t channel, float* grad_pre)
      : args_(args), problem_(args.problem), channel_(channel), grad_pre_(grad_pre) {
    channels_ = std::min(kStrip, problem_.channels - channel);
    first_ = chunk * args.tokens_per_chunk;
    last_ = std::min(first_ + args.tokens_per_chunk, problem_.tokens);
    grad_weight_ = args.partial + chunk * (problem_.width + 1) * problem_.channels + channel;
  }

  void run() {
    for (int64_t d = 0; d <= problem_.width; ++d)
      for_each_vector(channels_, [&](int64_t c, auto lanes) { store(share(d) + c, Vec{}, lanes); });
    // x[t] reaches up to pre[t + width - 1]: so far behind, and beyond the chunk's end, go the gradients of pre.
    const int64_t ahead = problem_.width - 1;
    for (int64_t token = first_; token < last_ + ahead; ++token) {
      if (token < problem_.tokens) differentiate_activation(token);
      if (token < last_ && problem_.reach[token] >= 0) add_shares(token);
      if (token - ahead >= first_) gather(token - ahead);
    }
  }

 private:
  // The share of the weight at distance d in its gradient; of the bias, at distance `width`.
  float* share(int64_t d) const { return grad_weight_ + d * problem_.channels; }

  float* grad_pre(int64_t token) const { return grad_pre_ + token % problem_.width * kStrip; }

  void differentiate_activation(int64_t token) {
    const bool outside = problem_.reach[token] < 0;
    const T* grad_y = row<T>(args_.grad_y, token) + channel_;
    for_each_vector(channels_, [&](int64_t c, auto lanes) {
      Vec gradient = outside ? Vec{} : load(grad_y + c, lanes);
      if (problem_.silu && !outside) {
        const Vec pre = convolve<T>(problem_, token, channel_ + c, lanes), s = sigmoid(pre);
        gradient *= s + pre * s * (1.0f - s);
      }
      store(grad_pre(token) + c, gradient, lanes);
    });
  }

  void add_shares(int64_t token) {
    const auto add = [&](int64_t d, auto&& factor) {
      for_each_vector(channels_, [&](int64_t c, auto lanes) {
        const Vec term = load(grad_pre(token) + c, lanes) * factor(c, lanes);
        store(share(d) + c, load(share(d) + c, lanes) + term, lanes);
      });
    };
    for (int64_t d = 0; d <= problem_.reach[token]; ++d) {
      const T* x = row<T>(problem_.x, token - d) + channel_;
      add(d, [&](int64_t c, auto lanes) { return load(x + c, lanes); });
    }
    add(problem_.width, [&](int64_t, auto) { return broadcast(1.0f); });
  }

  // grad_x[t] = Σ weight[d] · grad_pre[t + d] over the tokens that t reaches.
  void gather(int64_t token) {
    T* grad_x = row<T>(args_.grad_x, token) + channel_;
    for_each_vector(channels_, [&](int64_t c, auto lanes) {
      Vec gradient = {};
      for (int64_t d = 0; d < problem_.width && token + d < problem_.tokens && problem_.reach[token + d] >= d; ++d)
        gradient +=
            load(problem_.weight + d * problem_.channels + channel_ + c, lanes) * load(grad_pre(token + d) + c, lanes);
      store(grad_x + c, gradient, lanes, args_.grad_x.past_cache);
    });
  }

  const CausalConv1dBackward& args_;
  const CausalConv1d& problem_;
  int64_t channel_, channels_, first_, last_;
  float *grad_weight_, *grad_pre_;
};

}  // namespace

void causal_conv1d_forward_kernel(const CausalConv1dForward& args, int64_t begin, int64_t end) {
  const CausalConv1d& problem = args.problem;
  with_type(problem.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item * args.tokens_per_item, last = std::min(first + args.tokens_per_item, problem.tokens);
      for (int64_t strip = 0; strip < problem.channels; strip += kStrip)
        for (int64_t token = first; token < last; ++token) {
          const bool outside = problem.reach[token] < 0;
          T* y = row<T>(args.y, token) + strip;
          for_each_vector(std::min(kStrip, problem.channels - strip), [&](int64_t c, auto lanes) {
            const Vec pre = outside ? Vec{} : convolve<T>(problem, token, strip + c, lanes);
            store(y + c, problem.silu ? pre * sigmoid(pre) : pre, lanes, args.y.past_cache);
          });
        }
    }
  });
}

void causal_conv1d_backward_kernel(const CausalConv1dBackward& args, int64_t begin, int64_t end) {
  with_type(args.problem.type, [&](auto element) {
    using T = decltype(element);
    const FloatBuffer grad_pre(args.problem.width * kStrip);
    for (int64_t chunk = begin; chunk < end; ++chunk)
      for (int64_t strip = 0; strip < args.problem.channels; strip += kStrip)
        BackwardStrip<T>(args, chunk, strip, grad_pre.data()).run();
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
