#include "rotary.h"

#include <type_traits>

#include "common/vec.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

// Pairs (i, i + half):  out[i] = a cos[i] − b sin[i],  out[i + half] = b cos[i + half] + a sin[i + half].
template <bool transposed, class In, class Out, class Angle>
void rotate_halves(const In* x, Out* y, const Angle* cos, const Angle* sin, int64_t half) {
  for_each_vector(half, [&](int64_t i, auto lanes) {
    const Vec a = load(x + i, lanes), b = load(x + half + i, lanes);
    const Vec cos_a = load(cos + i, lanes), cos_b = load(cos + half + i, lanes);
    const Vec sin_a = load(sin + i, lanes), sin_b = load(sin + half + i, lanes);
    store(y + i, transposed ? a * cos_a + b * sin_b : a * cos_a - b * sin_a, lanes);
    store(y + half + i, transposed ? b * cos_b - a * sin_a : b * cos_b + a * sin_b, lanes);
  });
}

template <int... lane>
Vec swap_neighbours(Vec v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane ^ 1)...);
}

template <int... lane>
Vec repeat_each(Vec v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane / 2)...);
}

template <int... lane>
Vec alternate_signs(std::integer_sequence<int, lane...>) {
  return Vec{(lane % 2 ? 1.0f : -1.0f)...};
}

// Pairs (2i, 2i + 1):  out[2i] = a cos[i] − b sin[i],  out[2i + 1] = b cos[i] + a sin[i].
template <bool transposed, class In, class Out, class Angle>
void rotate_neighbours(const In* x, Out* y, const Angle* cos, const Angle* sin, int64_t rotary_dim) {
  constexpr std::make_integer_sequence<int, kLanes> all;
  const Vec sign = transposed ? -alternate_signs(all) : alternate_signs(all);
  for_each_vector(rotary_dim, [&](int64_t i, auto lanes) {
    const FirstLanes half = {lanes.count / 2};
    const Vec v = load(x + i, lanes);
    const Vec c = repeat_each(load(cos + i / 2, half), all), s = repeat_each(load(sin + i / 2, half), all);
    store(y + i, v * c + swap_neighbours(v, all) * (s * sign), lanes);
  });
}

template <bool transposed, class In, class Out>
void rotate(const Rotary& args, const RotaryHeads& heads, int64_t batch, int64_t first, int64_t last) {
  using Angle = std::conditional_t<std::is_same_v<In, Out>, In, float>;
  const auto angles = [&](const RotaryAngles& a, int64_t position) {
    return static_cast<const Angle*>(a.data) + batch * a.batch_stride + position * a.seq_stride;
  };
  const auto row_offset = [&](const HeadStrides& strides, int64_t head, int64_t position) {
    return batch * strides.batch + head * strides.head + position * strides.seq;
  };
  const auto rotate_row = [&](int64_t head, int64_t position) {
    const In* x = static_cast<const In*>(heads.in) + row_offset(heads.in_strides, head, position);
    Out* y = static_cast<Out*>(heads.out) + row_offset(heads.out_strides, head, position);
    const Angle *cos = angles(args.cos, position), *sin = angles(args.sin, position);
    if (args.interleaved) {
      rotate_neighbours<transposed>(x, y, cos, sin, args.rotary_dim);
    } else {
      rotate_halves<transposed>(x, y, cos, sin, args.rotary_dim / 2);
    }
    const In* rest = x + args.rotary_dim;
    Out* rest_out = y + args.rotary_dim;
    for_each_vector(args.head_dim - args.rotary_dim,
                    [&](int64_t i, auto lanes) { store(rest_out + i, load(rest + i, lanes), lanes); });
  };

  // In the order in which the heads lie in memory.
  if (heads.in_strides.head < heads.in_strides.seq) {
    for (int64_t position = first; position < last; ++position)
      for (int64_t head = 0; head < heads.count; ++head) rotate_row(head, position);
  } else {
    for (int64_t head = 0; head < heads.count; ++head)
      for (int64_t position = first; position < last; ++position) rotate_row(head, position);
  }
}

}  // namespace

void rotary_kernel(const Rotary& args, int64_t begin, int64_t end) {
  const auto rotate_all = [&]<bool transposed, class In, class Out>(std::bool_constant<transposed>, In, Out) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t batch = block / args.blocks_per_sequence;
      const int64_t first = block % args.blocks_per_sequence * Rotary::kPositionsPerBlock;
      const int64_t last =
          first + Rotary::kPositionsPerBlock < args.seq ? first + Rotary::kPositionsPerBlock : args.seq;
      rotate<transposed, In, Out>(args, args.q, batch, first, last);
      rotate<transposed, In, Out>(args, args.k, batch, first, last);
    }
  };
  // Forward may widen half precision to float32 angles; the gradient comes back from there.
  if (args.transposed) {
    with_types(args.out_type, args.in_type,
               [&](auto out, auto in) { rotate_all(std::true_type{}, in, out); });
  } else {
    with_types(args.in_type, args.out_type,
               [&](auto in, auto out) { rotate_all(std::false_type{}, in, out); });
  }
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
