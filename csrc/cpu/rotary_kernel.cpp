#include "rotary.h"

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int... lane>
Vec swap_neighbours(Vec v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane ^ 1)...);
}

// How one position turns: out[i] = cos[i] · x[i] + sin[i] · x[partner of i]. The partner is half of rotary_dim away, or
// the neighbour where pairs are interleaved. Made once per position for all heads, with the signs in `sin`.
struct Rotation {
  alignas(64) float cos[Rotary::kMaxRotaryDim];
  alignas(64) float sin[Rotary::kMaxRotaryDim];
};

template <class Angle>
void prepare(const Rotary& args, const Angle* cos, const Angle* sin, Rotation& rotation) {
  const int64_t half = args.rotary_dim / 2;
  if (args.interleaved) {  // both of a pair turn by the angle in the first half
    const float sign = args.transposed ? -1.0f : 1.0f;
    for (int64_t i = 0; i < half; ++i) {
      rotation.cos[2 * i] = rotation.cos[2 * i + 1] = to_float(cos[i]);
      rotation.sin[2 * i + 1] = sign * to_float(sin[i]);
      rotation.sin[2 * i] = -rotation.sin[2 * i + 1];
    }
    return;
  }
  // out[i] = cos[i] a − sin[i] b,  out[i + half] = cos[i + half] b + sin[i + half] a, or the transpose of that.
  const Angle* sin_first = args.transposed ? sin + half : sin;
  const Angle* sin_second = args.transposed ? sin : sin + half;
  const float sign = args.transposed ? -1.0f : 1.0f;
  for_each_vector(args.rotary_dim,
                  [&](int64_t i, auto lanes) { store(rotation.cos + i, load(cos + i, lanes), lanes); });
  for_each_vector(half, [&](int64_t i, auto lanes) {
    store(rotation.sin + i, load(sin_first + i, lanes) * -sign, lanes);
    store(rotation.sin + half + i, load(sin_second + i, lanes) * sign, lanes);
  });
}

template <class In, class Out>
void rotate_row(const Rotary& args, const Rotation& rotation, const In* x, Out* y, bool past_cache) {
  const float *cos = rotation.cos, *sin = rotation.sin;
  const int64_t rotary_dim = args.rotary_dim, half = rotary_dim / 2;
  if (args.interleaved) {
    for_each_vector(rotary_dim, [&](int64_t i, auto lanes) {
      const Vec v = load(x + i, lanes);
      const Vec out = v * load(cos + i, lanes) + swap_neighbours(v, Lanes{}) * load(sin + i, lanes);
      store(y + i, out, lanes, past_cache);
    });
  } else {
    for_each_vector(half, [&](int64_t i, auto lanes) {
      const Vec a = load(x + i, lanes), b = load(x + half + i, lanes);
      store(y + i, a * load(cos + i, lanes) + b * load(sin + i, lanes), lanes, past_cache);
      store(y + half + i, b * load(cos + half + i, lanes) + a * load(sin + half + i, lanes), lanes, past_cache);
    });
  }
  for_each_vector(args.head_dim - rotary_dim, [&](int64_t i, auto lanes) {
    store(y + rotary_dim + i, load(x + rotary_dim + i, lanes), lanes, past_cache);
  });
}

int64_t offset(const HeadStrides& strides, int64_t batch, int64_t head, int64_t position) {
  return batch * strides.batch + head * strides.head + position * strides.seq;
}

// The heads of the positions [first, first + count), in the order in which they lie in memory.
template <class In, class Out>
void rotate(const Rotary& args, const Rotation* rotations, const RotaryHeads& heads, int64_t batch, int64_t first,
            int64_t count) {
  const auto rotate_one = [&](int64_t head, int64_t i) {
    const In* x = static_cast<const In*>(heads.in) + offset(heads.in_strides, batch, head, first + i);
    Out* y = static_cast<Out*>(heads.out) + offset(heads.out_strides, batch, head, first + i);
    rotate_row(args, rotations[i], x, y, heads.past_cache);
  };
  if (heads.in_strides.head < heads.in_strides.seq) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t head = 0; head < heads.count; ++head) rotate_one(head, i);
  } else {
    for (int64_t head = 0; head < heads.count; ++head)
      for (int64_t i = 0; i < count; ++i) rotate_one(head, i);
  }
}

template <class Angle>
const Angle* angles_at(const RotaryAngles& angles, int64_t batch, int64_t position) {
  return static_cast<const Angle*>(angles.data) + batch * angles.batch_stride + position * angles.seq_stride;
}

}  // namespace

void rotary_kernel(const Rotary& args, int64_t begin, int64_t end) {
  Rotation rotations[Rotary::kPositionsPerBlock];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t batch = block / args.blocks_per_sequence;
    const int64_t first = block % args.blocks_per_sequence * Rotary::kPositionsPerBlock;
    const int64_t left = args.seq - first;
    const int64_t count = left < Rotary::kPositionsPerBlock ? left : Rotary::kPositionsPerBlock;
    with_type(args.angle_type, [&](auto angle) {
      using Angle = decltype(angle);
      for (int64_t i = 0; i < count; ++i)
        prepare(args, angles_at<Angle>(args.cos, batch, first + i), angles_at<Angle>(args.sin, batch, first + i),
                rotations[i]);
    });
    with_type(args.in_type, [&](auto in) {
      using In = decltype(in);
      with_type(args.out_type, [&](auto out) {
        using Out = decltype(out);
        rotate<In, Out>(args, rotations, args.q, batch, first, count);
        rotate<In, Out>(args, rotations, args.k, batch, first, count);
      });
    });
  }
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
