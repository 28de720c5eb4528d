// Seeded bugs of memory, queues and operands.
#include "harness.h"

namespace twin_tests {
namespace {

constexpr uint32_t kBytes = kElements * sizeof(float);

void capacity(const Arguments&, bool seeded) {
  TPipe pipe;
  TBuf<> buffer;
  pipe.InitBuffer(buffer, seeded ? (192 << 10) + 32 : 192 << 10);
}

void too_many_buffers(const Arguments&, bool seeded) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> queue;
  pipe.InitBuffer(queue, seeded ? 65 : 64, 32);
}

void memory_of_the_other_core(const Arguments&, bool seeded) {
  TPipe pipe;
  TQue<TPosition::A1, 1> l1;
  TBuf<> ub;
  if (seeded) {
    pipe.InitBuffer(l1, 1, 512);
  } else {
    pipe.InitBuffer(ub, 512);
  }
}

// One pass through an input queue, a computation and an output queue; the bug is chosen by the template argument.
enum Step {
  kAllocTwice,
  kDequeueEmpty,
  kEnqueuePastDepth,
  kForeignTensor,
  kFreeTwice,
  kUseAfterFree,
  kUseAfterEnqueue,
  kNeverFreed,
  kNeverDequeued,
  kPartialBlock,
  kMisaligned,
  kLocalBounds,
  kGlobalBounds,
  kPastArgument,
  kOutsideArguments,
  kWriteInput,
  kPartOfOutput,
  kUninitialized,
  kUninitializedWorkspace,
  kMask,
  kRepeatStride,
  kOverlap,
  kPartialRepeat,
  kSelectSpace,
  kRounding,
  kGatherOffset,
  kGatherInPlace,
  kAtomicLeftOn,
  kTensorOffset,
};

template <Step step>
void pass(const Arguments& arguments, bool seeded) {
  const auto bug = [seeded](Step s) { return seeded && s == step; };
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<> work;
  pipe.InitBuffer(in, step == kEnqueuePastDepth ? 2 : 1, kBytes);
  pipe.InitBuffer(out, 1, kBytes);
  pipe.InitBuffer(work, bug(kSelectSpace) ? 180 << 10 : 4 * kBytes);
  const LocalTensor<float> t = work.Get<float>(), u = t[kElements];
  const LocalTensor<uint32_t> offsets = u[kElements].ReinterpretCast<uint32_t>();
  const LocalTensor<uint8_t> bits = u[2 * kElements].ReinterpretCast<uint8_t>();

  LocalTensor<float> x = in.AllocTensor<float>();
  if (bug(kAllocTwice)) in.AllocTensor<float>();
  GlobalTensor<float> source = global(arguments.x), target = global(arguments.y);
  if (bug(kPastArgument)) source.SetGlobalBuffer(arguments.x);
  if (bug(kOutsideArguments)) source.SetGlobalBuffer(reinterpret_cast<float*>(0x1000));
  if (bug(kWriteInput)) target = source;
  if (bug(kUninitializedWorkspace)) source = global(arguments.workspace);
  const uint32_t first = bug(kGlobalBounds) || bug(kPastArgument) ? 8 : 0;
  DataCopy(x, source[first], bug(kPartialBlock) ? kElements - 1 : kElements);
  if (bug(kDequeueEmpty)) in.DeQue<float>();
  in.EnQue(x);
  if (bug(kEnqueuePastDepth)) in.EnQue(in.AllocTensor<float>());
  if (bug(kNeverDequeued)) return;
  if (!bug(kUseAfterEnqueue)) x = in.DeQue<float>();

  LocalTensor<float> y = out.AllocTensor<float>();
  if (bug(kUninitialized)) {
    Adds(y, t, 1.0f, kElements);
  } else {
    Adds(y, x, 1.0f, bug(kLocalBounds) ? kElements + 1 : kElements);
  }
  PipeBarrier<PIPE_V>();
  Mul(t, x, x, bug(kMask) ? 65 : 64, 16, {1, 1, 1, uint8_t(bug(kRepeatStride) ? 0 : 8), 8, 8});
  Mul(u[bug(kMisaligned) ? 1 : 0], x, x, 64);
  PipeBarrier<PIPE_V>();
  if (step == kOverlap) Adds(t[seeded ? 8 : 512], t, 1.0f, 64);
  if (step == kPartialRepeat) CompareScalar(bits, x, 0.0f, CMPMODE::LT, seeded ? 96 : 128);
  if (step == kSelectSpace) {
    CompareScalar(bits, x, 0.0f, CMPMODE::LT, 128);
    PipeBarrier<PIPE_V>();
    Select(u, bits, x, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 128);
  }
  if (step == kRounding) {
    Cast(u.ReinterpretCast<bfloat16_t>(), x, seeded ? RoundMode::CAST_NONE : RoundMode::CAST_RINT, 64);
  }
  if (step == kGatherOffset || step == kGatherInPlace) {
    Duplicate(offsets, uint32_t(bug(kGatherOffset) ? 6 : 8), 64);
    PipeBarrier<PIPE_V>();
    Gather(bug(kGatherInPlace) ? x : u, x, offsets, 0, 64);
  }
  if (bug(kTensorOffset)) Adds(t[5 * kElements], t, 1.0f, 8);
  if (bug(kForeignTensor)) out.EnQue(x);
  out.EnQue(y);
  if (!bug(kNeverFreed)) in.FreeTensor(x);
  if (bug(kFreeTwice)) in.FreeTensor(x);
  if (bug(kUseAfterFree)) Adds(t, x, 1.0f, 8);

  y = out.DeQue<float>();
  if (step == kAtomicLeftOn) SetAtomicAdd<float>();
  DataCopy(target, y, bug(kPartOfOutput) ? kElements - 8 : kElements);
  if (step == kAtomicLeftOn && !seeded) SetAtomicNone();
  out.FreeTensor(y);
}

void too_many_tensors(const Arguments&, bool seeded) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> first, second;
  pipe.InitBuffer(first, 8, 32);
  pipe.InitBuffer(second, 1, 32);
  LocalTensor<float> tensors[9];
  for (int i = 0; i < 8; ++i) tensors[i] = first.AllocTensor<float>();
  if (seeded) second.AllocTensor<float>();
  for (int i = 0; i < 8; ++i) first.FreeTensor(tensors[i]);
}

template <Step step>
constexpr Bug kPass = {Cores::kVector, 1, pass<step>};

const AddBugs add({
    {"capacity", {Cores::kVector, 1, capacity, Use::kWorkspace}},
    {"too_many_buffers", {Cores::kVector, 1, too_many_buffers, Use::kWorkspace}},
    {"memory_of_the_other_core", {Cores::kVector, 1, memory_of_the_other_core, Use::kWorkspace}},
    {"too_many_tensors", {Cores::kVector, 1, too_many_tensors, Use::kWorkspace}},
    {"alloc_twice", kPass<kAllocTwice>},
    {"dequeue_empty", kPass<kDequeueEmpty>},
    {"enqueue_past_depth", kPass<kEnqueuePastDepth>},
    {"foreign_tensor", kPass<kForeignTensor>},
    {"free_twice", kPass<kFreeTwice>},
    {"use_after_free", kPass<kUseAfterFree>},
    {"use_after_enqueue", kPass<kUseAfterEnqueue>},
    {"never_freed", kPass<kNeverFreed>},
    {"never_dequeued", kPass<kNeverDequeued>},
    {"partial_block", kPass<kPartialBlock>},
    {"misaligned", kPass<kMisaligned>},
    {"local_bounds", kPass<kLocalBounds>},
    {"global_bounds", kPass<kGlobalBounds>},
    {"past_argument", kPass<kPastArgument>},
    {"outside_arguments", kPass<kOutsideArguments>},
    {"write_input", kPass<kWriteInput>},
    {"part_of_output", kPass<kPartOfOutput>},
    {"uninitialized", kPass<kUninitialized>},
    {"uninitialized_workspace", kPass<kUninitializedWorkspace>},
    {"mask", kPass<kMask>},
    {"repeat_stride", kPass<kRepeatStride>},
    {"overlap", kPass<kOverlap>},
    {"partial_repeat", kPass<kPartialRepeat>},
    {"select_space", kPass<kSelectSpace>},
    {"rounding", kPass<kRounding>},
    {"gather_offset", kPass<kGatherOffset>},
    {"gather_in_place", kPass<kGatherInPlace>},
    {"atomic_left_on", kPass<kAtomicLeftOn>},
    {"tensor_offset", kPass<kTensorOffset>},
});

}  // namespace
}  // namespace twin_tests
