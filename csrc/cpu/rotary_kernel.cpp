#include "rotary.h"

#include <type_traits>
#include <utility>

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
  float* cos;  // [rotary_dim]
  float* sin;
};

// Memory for the rotations of a block. They lie close together: at distances of 4 KiB and more they would share a few
// sets of the first-level cache and drive each other out of it.
class Rotations {
 public:
  explicit Rotations(int64_t rotary_dim) : stride_((rotary_dim + 15) / 16 * 16) {}

  Rotation operator[](int64_t position) {
    float* cos = factors_ + position * 2 * stride_;
    return {cos, cos + stride_};
  }

 private:
  int64_t stride_;
  alignas(64) float factors_[Rotary::kPositionsPerBlock * 2 * Rotary::kMaxRotaryDim];
};

template <class Angle>
void prepare(const Rotary& args, const Angle* cos, const Angle* sin, Rotation rotation) {
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

// The heads of one position.
template <class In, class Out>
struct Heads {
  int64_t count;
  const In* in;
  int64_t in_stride;  // from head to head, in elements
  Out* out;
  int64_t out_stride;
  bool past_cache;
};

// How far ahead of what is rotated a large input is fetched, in bytes. The processor alone loses its way at each change
// between queries and keys.
constexpr int64_t kAhead = 4096;

template <int count>
using Vectors = std::integral_constant<int, count>;

// Calls body(i, lanes, Vectors<n>) for runs of n vectors from element i on that together make [0, length). The longest
// is half a head of 128 on AVX-512: rows are then read and written from end to end, and the registers hold all factors.
template <class Body>
void for_each_run(int64_t length, Body&& body) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= length; i += 4 * kLanes) body(i, AllLanes{}, Vectors<4>{});
  // What is left of whole cache lines stays in one run: half a line written past the cache costs as much as a line
  // read.
  if (i + 2 * kLanes <= length) body(i, AllLanes{}, Vectors<2>{}), i += 2 * kLanes;
  if (i + kLanes <= length) body(i, AllLanes{}, Vectors<1>{}), i += kLanes;
  if (i < length) body(i, FirstLanes{length - i}, Vectors<1>{});
}

// The factors of a part of a position stay in registers from head to head: loading them for each head would cost more
// than the rotation.
template <class In, class Out>
void rotate_halves(Rotation rotation, int64_t half, const Heads<In, Out>& heads) {
  for_each_run(half, [&](int64_t i, auto lanes, auto vectors) {
    constexpr int n = decltype(vectors)::value;
    Vec cos_first[n], sin_first[n], cos_second[n], sin_second[n];
    for (int v = 0; v < n; ++v) {
      const int64_t first = i + v * kLanes, second = half + first;
      cos_first[v] = load(rotation.cos + first, lanes), sin_first[v] = load(rotation.sin + first, lanes);
      cos_second[v] = load(rotation.cos + second, lanes), sin_second[v] = load(rotation.sin + second, lanes);
    }
    for (int64_t head = 0; head < heads.count; ++head) {
      const In* x = heads.in + head * heads.in_stride + i;
      Out* y = heads.out + head * heads.out_stride + i;
      if (heads.past_cache)
        for (int v = 0; v < n; ++v) prefetch(x + v * kLanes, kAhead), prefetch(x + half + v * kLanes, kAhead);
      Vec a[n], b[n];
      for (int v = 0; v < n; ++v) a[v] = load(x + v * kLanes, lanes), b[v] = load(x + half + v * kLanes, lanes);
      for (int v = 0; v < n; ++v)
        store(y + v * kLanes, a[v] * cos_first[v] + b[v] * sin_first[v], lanes, heads.past_cache);
      for (int v = 0; v < n; ++v)
        store(y + half + v * kLanes, b[v] * cos_second[v] + a[v] * sin_second[v], lanes, heads.past_cache);
    }
  });
}

template <class In, class Out>
void rotate_neighbours(Rotation rotation, int64_t rotary_dim, const Heads<In, Out>& heads) {
  for_each_run(rotary_dim, [&](int64_t i, auto lanes, auto vectors) {
    constexpr int n = decltype(vectors)::value;
    Vec cos[n], sin[n];
    for (int v = 0; v < n; ++v) {
      cos[v] = load(rotation.cos + i + v * kLanes, lanes);
      sin[v] = load(rotation.sin + i + v * kLanes, lanes);
    }
    for (int64_t head = 0; head < heads.count; ++head) {
      const In* x = heads.in + head * heads.in_stride + i;
      Out* y = heads.out + head * heads.out_stride + i;
      for (int v = 0; v < n; ++v) {
        if (heads.past_cache) prefetch(x + v * kLanes, kAhead);
        const Vec pairs = load(x + v * kLanes, lanes);
        store(y + v * kLanes, pairs * cos[v] + swap_neighbours(pairs, Lanes{}) * sin[v], lanes, heads.past_cache);
      }
    }
  });
}

template <class In, class Out>
void rotate_position(const Rotary& args, Rotation rotation, const Heads<In, Out>& heads) {
  if (args.interleaved) {
    rotate_neighbours(rotation, args.rotary_dim, heads);
  } else {
    rotate_halves(rotation, args.rotary_dim / 2, heads);
  }
  for (int64_t head = 0; head < heads.count; ++head) {  // the rest passes through
    const In* x = heads.in + head * heads.in_stride + args.rotary_dim;
    Out* y = heads.out + head * heads.out_stride + args.rotary_dim;
    for_each_vector(args.head_dim - args.rotary_dim,
                    [&](int64_t i, auto lanes) { store(y + i, load(x + i, lanes), lanes, heads.past_cache); });
  }
}

int64_t offset(const HeadStrides& strides, int64_t batch, int64_t head, int64_t position) {
  return batch * strides.batch + head * strides.head + position * strides.seq;
}

// The heads of the positions [first, first + count), in the order in which they lie in memory.
template <class In, class Out>
void rotate(const Rotary& args, Rotations& rotations, const RotaryHeads& all, int64_t batch, int64_t first,
            int64_t count) {
  const auto rotate_heads = [&](int64_t head, int64_t heads, int64_t i) {
    const In* x = static_cast<const In*>(all.in) + offset(all.in_strides, batch, head, first + i);
    Out* y = static_cast<Out*>(all.out) + offset(all.out_strides, batch, head, first + i);
    rotate_position(args, rotations[i],
                    Heads<In, Out>{heads, x, all.in_strides.head, y, all.out_strides.head, all.past_cache});
  };
  if (all.in_strides.head < all.in_strides.seq) {
    for (int64_t i = 0; i < count; ++i) rotate_heads(0, all.count, i);
  } else {
    for (int64_t head = 0; head < all.count; ++head)
      for (int64_t i = 0; i < count; ++i) rotate_heads(head, 1, i);
  }
}

template <class Angle>
const Angle* angles_at(const RotaryAngles& angles, int64_t batch, int64_t position) {
  return static_cast<const Angle*>(angles.data) + batch * angles.batch_stride + position * angles.seq_stride;
}

}  // namespace

void rotary_kernel(const Rotary& args, int64_t begin, int64_t end) {
  Rotations rotations(args.rotary_dim);
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
