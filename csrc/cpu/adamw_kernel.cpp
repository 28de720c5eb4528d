#include "adamw.h"

#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// An integer hash of low bias (Wellons' lowbias32): every bit of x moves every bit of the result.
inline Bits32 hash(Bits32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline Bits32 lane_numbers() {
  Bits32 numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// Random bits for the elements from `index`, a multiple of kLanes, on: a function of the key and the index alone.
inline Bits32 random_bits(const uint32_t key[2], int64_t index) {
  const uint32_t low = static_cast<uint32_t>(index), high = static_cast<uint32_t>(index >> 32);
  return hash(hash((lane_numbers() + low) ^ key[0]) ^ (key[1] + high));
}

// v rounded to bfloat16, up with a probability equal to the fraction that is cut off.
inline Vec round_stochastically(Vec v, Bits32 random) {
  const Bits32 rounded = ((Bits32)v + (random >> 16)) & 0xffff0000;
  return v == v ? (Vec)rounded : v;
}

// The elements [first, last) of one tensor.
template <class P, class G>
void step(const AdamWTensor& t, const AdamWStep& args, int64_t first, int64_t last) {
  const G* grad = static_cast<const G*>(t.grad) + first;
  P* param = static_cast<P*>(t.param) + first;
  float *exp_avg = t.exp_avg + first, *exp_avg_sq = t.exp_avg_sq + first;
  bfloat16* copy = t.copy == nullptr ? nullptr : t.copy + first;
  const AdamWStep a = args;  // local: the stores below cannot change it
  const bool past_cache = t.copy_past_cache;
  const float step_size = t.step_size, inverse_correction = t.inverse_correction;

  for_each_vector(last - first, [&](int64_t i, auto lanes) {
    const Vec g = load(grad + i, lanes) * a.grad_scale;
    Vec m = load(exp_avg + i, lanes), v = load(exp_avg_sq + i, lanes), p = load(param + i, lanes);
    m += (g - m) * a.weight_of_grad;
    v = v * a.beta2 + g * g * a.weight_of_square;
    p -= p * a.decay;
    p -= m * step_size / (sqrt(v) * inverse_correction + a.eps);
    store(exp_avg + i, m, lanes);
    store(exp_avg_sq + i, v, lanes);
    if constexpr (std::is_same_v<P, bfloat16>) {
      if (a.stochastic_rounding) p = round_stochastically(p, random_bits(t.key, first + i));
    } else {
      if (copy != nullptr) store(copy + i, p, lanes, past_cache);
    }
    store(param + i, p, lanes);
  });
}

void step(const AdamWTensor& t, const AdamWStep& args, int64_t first, int64_t last) {
  with_type(t.grad_type, [&](auto g) {
    using G = decltype(g);
    t.param_type == DType::kBFloat16 ? step<bfloat16, G>(t, args, first, last) : step<float, G>(t, args, first, last);
  });
}

// Where a block that starts or ends at `position` of a tensor starts or ends indeed: at a whole number of cache lines.
int64_t cut(int64_t position, int64_t numel) {
  constexpr int64_t kAlign = 64;  // elements
  if (position >= numel) return numel;
  return position <= 0 ? 0 : position / kAlign * kAlign;
}

}  // namespace

void adamw_step_kernel(const AdamWStep& args, int64_t begin, int64_t end) {
  int64_t first = begin * kAdamWBlock, last = end * kAdamWBlock;  // relative to the tensor at hand
  for (int64_t i = 0; i < args.count && last > 0; ++i) {
    const AdamWTensor& t = args.tensors[i];
    const int64_t from = cut(first, t.numel), to = cut(last, t.numel);
    if (from < to) step(t, args, from, to);
    first -= t.numel;
    last -= t.numel;
  }
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
