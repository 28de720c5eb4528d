// Seeded bugs of the cube core, and of the exchange between it and its vector cores.
#include "harness.h"

namespace twin_tests {
namespace {

enum Step {
  kQuant,
  kSourceStride,
  kTranspose,
  kLoadPosition,
  kPosition,
  kHf32,
  kAccumulate,
  kAlignment,
  kSumsAlignment,
  kExchange,
  kExchangeBack
};

// y [16, 16] = 2 · x [16, 16] · xᵀ on the cube core, in two products; z = y + 1 on the vector cores.
template <Step step>
void cube(const Arguments& arguments, bool seeded) {
  const auto bug = [seeded](Step s) { return seeded && s == step; };
  constexpr int kSize = 16 * 16;
  TPipe pipe;
  if ASCEND_IS_AIC {
    TQue<TPosition::A1, 1> l1;
    TQue<TPosition::A2, 1> l0a;
    TQue<TPosition::B2, 1> l0b;
    TQue<TPosition::CO1, 1> l0c;
    pipe.InitBuffer(l1, 1, kSize * sizeof(float));
    pipe.InitBuffer(l0a, 1, 2048);
    pipe.InitBuffer(l0b, 1, 2048);
    pipe.InitBuffer(l0c, 1, 2 * kSize * sizeof(float));
    if (!bug(kHf32)) SetHF32Mode(HF32Mode::DISABLE);
    LocalTensor<float> x = l1.AllocTensor<float>();
    Nd2NzParams copy;
    copy.ndNum = 1, copy.nValue = 16, copy.dValue = 16, copy.srcDValue = 16;
    copy.dstNzC0Stride = 16, copy.dstNzNStride = 1;
    DataCopy(x, global(arguments.x), copy);
    l1.EnQue(x);
    x = l1.DeQue<float>();
    LocalTensor<float> a = l0a.AllocTensor<float>(), b = l0b.AllocTensor<float>(), c = l0c.AllocTensor<float>();
    LoadData2DParams load;
    load.repeatTimes = 2, load.srcStride = 1, load.ifTranspose = bug(kTranspose);
    LoadData(bug(kAlignment) ? a[8] : a, x, load);
    load.ifTranspose = false;
    LoadData(bug(kLoadPosition) ? c : b, x, load);
    l1.FreeTensor(x);
    l0a.EnQue(a);
    l0b.EnQue(b);
    a = l0a.DeQue<float>(), b = l0b.DeQue<float>();
    MmadParams product;
    product.m = 16, product.n = 16, product.k = 16;
    Mmad(bug(kSumsAlignment) ? c[16] : c, bug(kPosition) ? b : a, b, product);
    product.cmatrixInitVal = false;
    if (!bug(kAccumulate)) PipeBarrier<PIPE_M>();
    Mmad(c, a, b, product);
    l0a.FreeTensor(a);
    l0b.FreeTensor(b);
    l0c.EnQue(c);
    c = l0c.DeQue<float>();
    FixpipeParamsV220 store;
    store.nSize = 16, store.mSize = 16, store.srcStride = bug(kSourceStride) ? 8 : 16, store.dstStride = 16;
    store.quantPre = bug(kQuant) ? F322F16 : NoQuant;
    Fixpipe(global(arguments.workspace), c, store);
    l0c.FreeTensor(c);
    CrossCoreSetFlag<2, PIPE_FIX>(0);
    CrossCoreWaitFlag(1);
  } else {
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 1, kSize * sizeof(float) / 2);
    pipe.InitBuffer(out, 1, kSize * sizeof(float) / 2);
    const uint32_t first = GetSubBlockIdx() * kSize / 2;
    if (!bug(kExchange)) CrossCoreWaitFlag(0);
    LocalTensor<float> x = in.AllocTensor<float>(), y = out.AllocTensor<float>();
    DataCopy(x, global(arguments.workspace)[first], kSize / 2);
    in.EnQue(x);
    x = in.DeQue<float>();
    Adds(y, x, 1.0f, kSize / 2);
    in.FreeTensor(x);
    out.EnQue(y);
    y = out.DeQue<float>();
    DataCopy(global(arguments.z)[first], y, kSize / 2);
    out.FreeTensor(y);
    if (!(bug(kExchangeBack) && GetSubBlockIdx() == 1)) CrossCoreSetFlag<2, PIPE_MTE3>(1);
    if (bug(kExchange)) CrossCoreWaitFlag(0);
    if (GetBlockIdx() == 0) fill(pipe, arguments.y);
  }
}

template <Step step>
constexpr Bug kCube = {Cores::kMixed, 1, cube<step>};

const AddBugs add({
    {"cube_quant", kCube<kQuant>},
    {"cube_source_stride", kCube<kSourceStride>},
    {"cube_transpose", kCube<kTranspose>},
    {"cube_load_position", kCube<kLoadPosition>},
    {"cube_position", kCube<kPosition>},
    {"cube_hf32", kCube<kHf32>},
    {"cube_accumulate", kCube<kAccumulate>},
    {"cube_alignment", kCube<kAlignment>},
    {"cube_sums_alignment", kCube<kSumsAlignment>},
    {"cube_exchange", kCube<kExchange>},
    {"cube_exchange_back", kCube<kExchangeBack>},
});

}  // namespace
}  // namespace twin_tests
