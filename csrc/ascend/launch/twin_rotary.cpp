#include "kernels/rotary.h"
#include "twin.h"

using namespace mindspeed::ascend;

namespace {

// Types of the heads that come in, of the angles and of the heads that go out, as the operator and its gradient have
// them: one type, or 16-bit heads with float32 angles that make float32 heads, or the gradient of that.
template <class F>
void with_types(int in, int angle, int out, F f) {
  with_type(in == kFloat ? out : in, [&](auto narrow) {
    if (angle != kFloat || (in == kFloat && out == kFloat)) return f(narrow, narrow, narrow);
    if (out == kFloat) return f(narrow, float(), float());
    f(float(), float(), narrow);
  });
}

struct TwinHeads {
  void *in, *out;
  int64_t in_bytes, out_bytes;
  RotaryHeads heads;
};

}  // namespace

extern "C" {

char* twin_rotary(Run how, int in, int angle, int out, const TwinHeads* q, const TwinHeads* k, void* cos, void* sin,
                  RotaryTiling* tiling) {
  tiling->q = q->heads, tiling->k = k->heads;
  tiling->heads = rotary_heads(*tiling, bytes_of(in), bytes_of(angle), bytes_of(out));
  if (tiling->rotary_dim > kRotaryMaxDim || tiling->heads == 0) {
    return refuse("rotary", "rotary_dim ", tiling->rotary_dim, " and head_dim ", tiling->head_dim,
                  " are too large: at most ", kRotaryMaxDim, ", and one head in local memory");
  }
  const int64_t angles = (tiling->angle_batch_stride == 0 ? 1 : tiling->batch) * tiling->seq * tiling->rotary_dim;
  const std::vector<GlobalBuffer> buffers = {
      input("q", q->in, q->in_bytes),
      input("k", k->in, k->in_bytes),
      input("cos", cos, angles * bytes_of(angle)),
      input("sin", sin, angles * bytes_of(angle)),
      output("q_out", q->out, q->out_bytes),
      output("k_out", k->out, k->out_bytes),
  };
  return run("rotary", Cores::kVector, how, buffers, [&] {
    with_types(in, angle, out, [&](auto in_element, auto angle_element, auto out_element) {
      Rotary<decltype(in_element), decltype(angle_element), decltype(out_element)> kernel;
      kernel.Init(gm(q->in), gm(k->in), gm(cos), gm(sin), gm(q->out), gm(k->out), *tiling);
      kernel.Process();
    });
  });
}
}
