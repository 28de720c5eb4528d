#include "twin.h"

using namespace mindspeed::ascend;

namespace {

struct TwinHeads {
  void *in, *out;
  int64_t in_bytes, out_bytes;
  RotaryHeads heads;
};

}  // namespace

extern "C" {

char* twin_rotary(Run how, Type in, Type angle, Type out, const TwinHeads* q, const TwinHeads* k, void* cos, void* sin,
                  RotaryTiling* tiling) {
  tiling->q = q->heads, tiling->k = k->heads;
  tiling->heads = rotary_heads(*tiling, bytes_of(in), bytes_of(angle), bytes_of(out));
  if (tiling->rotary_dim > kRotaryMaxDim || tiling->heads == 0) {
    return refuse("rotary", "rotary_dim ", tiling->rotary_dim, " and head_dim ", tiling->head_dim,
                  " are too large: at most ", kRotaryMaxDim, ", and one head in local memory");
  }
  const int64_t angles = (tiling->angle_batch_stride == 0 ? 1 : tiling->batch) * tiling->seq * tiling->rotary_dim;
  return run(how, [&](const Launch& launch) {
    launch_rotary(launch, in, angle, out, input("q", q->in, q->in_bytes), input("k", k->in, k->in_bytes),
                  input("cos", cos, angles * bytes_of(angle)), input("sin", sin, angles * bytes_of(angle)),
                  output("q_out", q->out, q->out_bytes), output("k_out", k->out, k->out_bytes), *tiling);
  });
}
}
