#include "causal_conv1d.h"

#include <algorithm>

#include "common/float_buffer.h"
#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Channels at a time: so few that the rows which tokens share stay in the first-level cache.
constexpr int64_t kStrip = 512;

// pre[t, c ...] of a token that is in a sequence. What the compiler would have to read again after each store, as it
// cannot know that the store leaves it alone, is held here.
template <class T>
class Convolution {
 public:
  Convolution(const CausalConv1d& problem, int64_t token)
      : bias_(problem.bias),
        weight_(problem.weight),
        channels_(problem.channels),
        x_(row<T>(problem.x, token)),
        stride_(problem.x.stride),
        reach_(problem.reach[token]) {}

  template <class Lanes>
  Vec operator()(int64_t c, Lanes lanes) const {
    Vec pre = load(bias_ + c, lanes);
    for (int64_t d = 0; d <= reach_; ++d)
      pre += load(weight_ + d * channels_ + c, lanes) * load(x_ - d * stride_ + c, lanes);
    return pre;
  }

 private:
  const float *bias_, *weight_;
  int64_t channels_;
  const T* x_;
  int64_t stride_, reach_;
};

// The gradients of one strip of channels in one chunk of tokens, a few tokens at a time: a sum over tokens is then
// loaded and stored once for all of them.
template <class T>
class BackwardStrip {
 public:
  static constexpr int64_t kChannels = 256, kTokens = 8;

  BackwardStrip(const CausalConv1dBackward& args, int64_t chunk, int64_t channel, float* grad_pre)
      : args_(args), problem_(args.problem), channel_(channel), grad_pre_(grad_pre), ahead_(problem_.width - 1) {
    channels_ = std::min(kChannels, problem_.channels - channel);
    first_ = chunk * args.tokens_per_chunk;
    last_ = std::min(first_ + args.tokens_per_chunk, problem_.tokens);
    grad_weight_ = args.partial + chunk * (problem_.width + 1) * problem_.channels + channel;
  }

  // In floats.
  static int64_t memory_size(int64_t width) { return (width - 1 + kTokens) * kChannels; }

  void run() {
    for (int64_t d = 0; d <= problem_.width; ++d) std::fill_n(share(d), channels_, 0.0f);
    // x[t] reaches up to pre[t + width - 1]: so far behind, and beyond the chunk's end, go the gradients of pre.
    for (int64_t begin = first_; begin < last_ + ahead_; begin += kTokens) {
      const int64_t end = std::min(begin + kTokens, last_ + ahead_);
      for (int64_t token = begin; token < end; ++token) differentiate_activation(token, grad_pre(token - begin));
      for (int64_t d = 0; d <= problem_.width; ++d) add_share(d, begin, std::min(end, last_));
      for (int64_t token = std::max(begin - ahead_, first_); token < end - ahead_; ++token)
        gather(token, grad_pre(token - begin));
      std::copy_n(grad_pre(end - begin - ahead_), ahead_ * kChannels, grad_pre(-ahead_));
    }
  }

 private:
  // The share of the weight at distance d in its gradient; of the bias, at distance `width`.
  float* share(int64_t d) const { return grad_weight_ + d * problem_.channels; }

  // Of the i-th of the present tokens; those before them, up to `ahead_`, are kept.
  float* grad_pre(int64_t i) const { return grad_pre_ + (ahead_ + i) * kChannels; }

  void differentiate_activation(int64_t token, float* grad_pre) {
    if (token >= problem_.tokens || problem_.reach[token] < 0) return (void)std::fill_n(grad_pre, channels_, 0.0f);
    const T* grad_y = row<T>(args_.grad_y, token) + channel_;
    const bool silu = problem_.silu;
    const Convolution<T> convolution(problem_, token);
    for_each_vector(channels_, [&](int64_t c, auto lanes) {
      Vec gradient = load(grad_y + c, lanes);
      if (silu) {
        const Vec pre = convolution(channel_ + c, lanes), s = sigmoid(pre);
        gradient *= s + pre * s * (1.0f - s);
      }
      store(grad_pre + c, gradient, lanes);
    });
  }

  // From the tokens [begin, end), at most kTokens.
  void add_share(int64_t d, int64_t begin, int64_t end) {
    const bool of_bias = d == problem_.width;
    const float* gradients[kTokens];
    const T* inputs[kTokens];
    int64_t count = 0;
    for (int64_t token = begin; token < end; ++token) {
      if (problem_.reach[token] < (of_bias ? 0 : d)) continue;
      gradients[count] = grad_pre(token - begin);
      inputs[count++] = of_bias ? nullptr : row<T>(problem_.x, token - d) + channel_;
    }
    float* sums = share(d);
    for_each_vector(channels_, [&](int64_t c, auto lanes) {
      Vec sum = load(sums + c, lanes);
      for (int64_t i = 0; i < count; ++i) {
        const Vec gradient = load(gradients[i] + c, lanes);
        sum += of_bias ? gradient : gradient * load(inputs[i] + c, lanes);
      }
      store(sums + c, sum, lanes);
    });
  }

  // grad_x[t] = Σ weight[d] · grad_pre[t + d] over the tokens that t reaches; grad_pre is t's.
  void gather(int64_t token, const float* grad_pre) {
    int64_t count = 0;
    while (count < problem_.width && token + count < problem_.tokens && problem_.reach[token + count] >= count) ++count;
    const float* weight = problem_.weight + channel_;
    const int64_t stride = problem_.channels;
    const bool past_cache = args_.grad_x.past_cache;
    T* grad_x = row<T>(args_.grad_x, token) + channel_;
    for_each_vector(channels_, [&](int64_t c, auto lanes) {
      Vec gradient = {};
      for (int64_t d = 0; d < count; ++d)
        gradient += load(weight + d * stride + c, lanes) * load(grad_pre + d * kChannels + c, lanes);
      store(grad_x + c, gradient, lanes, past_cache);
    });
  }

  const CausalConv1dBackward& args_;
  const CausalConv1d& problem_;
  int64_t channel_, channels_, first_, last_;
  float *grad_weight_, *grad_pre_;
  int64_t ahead_;
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
          const bool outside = problem.reach[token] < 0, silu = problem.silu, past_cache = args.y.past_cache;
          const Convolution<T> convolution(problem, token);
          T* y = row<T>(args.y, token) + strip;
          for_each_vector(std::min(kStrip, problem.channels - strip), [&](int64_t c, auto lanes) {
            const Vec pre = outside ? Vec{} : convolution(strip + c, lanes);
            store(y + c, silu ? pre * sigmoid(pre) : pre, lanes, past_cache);
          });
        }
    }
  });
}

void causal_conv1d_backward_kernel(const CausalConv1dBackward& args, int64_t begin, int64_t end) {
  with_type(args.problem.type, [&](auto element) {
    using T = decltype(element);
    using Strip = BackwardStrip<T>;
    const FloatBuffer grad_pre(Strip::memory_size(args.problem.width));
    for (int64_t chunk = begin; chunk < end; ++chunk)
      for (int64_t channel = 0; channel < args.problem.channels; channel += Strip::kChannels)
        Strip(args, chunk, channel, grad_pre.data()).run();
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
