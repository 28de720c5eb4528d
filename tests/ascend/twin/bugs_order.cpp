// Seeded bugs of flags, barriers and cores.
#include "harness.h"

namespace twin_tests {
namespace {

constexpr uint32_t kBytes = kElements * sizeof(float);

enum Step {
  kInputToVector,
  kVectorToVector,
  kVectorToScalar,
  kScalarToVector,
  kOutputToInput,
  kWaitWithoutSet,
  kSetWithoutWait,
  kSetTwice,
  kEventOutOfRange,
};

// Copies in, computes, copies out, twice over the same memory; every flag and barrier is needed.
template <Step step>
void pass(const Arguments& arguments, bool seeded) {
  const auto bug = [seeded](Step s) { return seeded && s == step; };
  const GlobalTensor<float> x = global(arguments.x), y = global(arguments.y), workspace = global(arguments.workspace);
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, 2 * kBytes);
  const LocalTensor<float> a = memory.Get<float>(kElements), b = memory.Get<float>()[kElements];

  if (bug(kWaitWithoutSet)) WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
  for (int round = 0; round < 2; ++round) {
    DataCopy(a, round == 0 ? x : workspace, kElements);
    SetFlag<HardEvent::MTE2_V>(bug(kEventOutOfRange) ? 8 : EVENT_ID0);
    if (bug(kSetTwice)) SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    if (!bug(kInputToVector)) WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    Adds(b, a, 1.0f, kElements);
    if (!bug(kVectorToVector)) PipeBarrier<PIPE_V>();
    Muls(b, b, 2.0f, kElements);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(round == 0 ? workspace : y, b, kElements);
    if (round == 1) break;
    SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
    if (!bug(kOutputToInput)) WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
  }
  if (bug(kSetWithoutWait)) SetFlag<HardEvent::V_MTE2>(EVENT_ID1);
}

// Without any flag from V to MTE3.
void vector_to_output(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, kBytes);
  const LocalTensor<float> a = memory.Get<float>();
  Duplicate(a, 1.0f, kElements);
  if (!seeded) {
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
  }
  DataCopy(global(arguments.y), a, kElements);
}

// Changes in place what an instruction may still be reading that is not the last one.
void vector_in_place(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, 2 * kBytes);
  const LocalTensor<float> a = memory.Get<float>(kElements), b = memory.Get<float>()[kElements];
  Duplicate(a, 1.0f, kElements);
  PipeBarrier<PIPE_V>();
  Adds(b, a, 1.0f, kElements);
  if (!seeded) PipeBarrier<PIPE_V>();
  Muls(a, a, 2.0f, kElements);
  SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
  WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
  DataCopy(global(arguments.y), b, kElements);
}

// Overwrites what is still being copied out.
void output_to_vector(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, kBytes);
  const LocalTensor<float> a = memory.Get<float>();
  Duplicate(a, 1.0f, kElements);
  SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
  WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
  DataCopy(global(arguments.y), a, kElements);
  if (!seeded) {
    SetFlag<HardEvent::MTE3_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_V>(EVENT_ID0);
  }
  PipeBarrier<PIPE_V>();
  Duplicate(a, 2.0f, kElements);
}

// Reads on the scalar pipe what the vector pipe wrote, and the other way round.
template <Step step>
void scalar(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, 64);
  const LocalTensor<float> a = memory.Get<float>();
  Duplicate(a, 1.0f, 8);
  if (!(seeded && step == kVectorToScalar)) {
    SetFlag<HardEvent::V_S>(EVENT_ID0);
    WaitFlag<HardEvent::V_S>(EVENT_ID0);
  }
  a.SetValue(8, a.GetValue(0));
  for (int i = 9; i < 16; ++i) a.SetValue(i, 0.0f);
  if (!(seeded && step == kScalarToVector)) {
    SetFlag<HardEvent::S_V>(EVENT_ID0);
    WaitFlag<HardEvent::S_V>(EVENT_ID0);
  }
  Adds(a[8], a[8], 1.0f, 8);
  fill(pipe, arguments.y);
}

// Overwrites a buffer of a queue after its flag to the vector pipe, but before that has read it.
void vector_to_input(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, 2 * kBytes);
  const LocalTensor<float> a = memory.Get<float>(kElements), b = memory.Get<float>()[kElements];
  for (int round = 0; round < 2; ++round) {
    DataCopy(a, global(arguments.x), kElements);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    if (round == 1) PipeBarrier<PIPE_V>();
    Adds(b, a, 1.0f, kElements);
    if (round == 1 || seeded) continue;
    SetFlag<HardEvent::V_MTE2>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID0);
  }
  fill(pipe, arguments.y);
}

// Two copies to the same place of global memory.
void output_to_output(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  fill(pipe, arguments.y);
  if (!seeded) PipeBarrier<PIPE_MTE3>();
  fill(pipe, arguments.y);
}

void events_exhausted(const Arguments&, bool seeded) {
  TPipe pipe;
  for (int i = 0; i < (seeded ? 9 : 8); ++i) SetFlag<HardEvent::MTE2_V>(pipe.AllocEventID<HardEvent::MTE2_V>());
  for (int i = 0; i < 8; ++i) {
    WaitFlag<HardEvent::MTE2_V>(i);
    pipe.ReleaseEventID<HardEvent::MTE2_V>(i);
  }
}

// The second core reads what the first one wrote.
void between_cores(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  if (GetBlockIdx() == 0) fill(pipe, arguments.workspace);
  SyncAll();
  if (GetBlockIdx() == 1) {
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, kBytes);
    LocalTensor<float> a = queue.AllocTensor<float>();
    DataCopy(a, global(arguments.workspace), kElements);
    queue.EnQue(a);
    a = queue.DeQue<float>();
    queue.FreeTensor(a);
  } else if (seeded) {
    fill(pipe, arguments.workspace);  // while the other core reads
  }
  if (GetBlockIdx() == 0) fill(pipe, arguments.y);
}

void same_output(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  if (seeded || GetBlockIdx() == 0) fill(pipe, arguments.y);
}

void deadlock(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  if (!seeded || GetBlockIdx() == 0) {
    CrossCoreSetFlag<0, PIPE_MTE3>(3);
    CrossCoreWaitFlag(3);
  }
  if (GetBlockIdx() == 0) fill(pipe, arguments.y);
}

void flag_never_taken(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  CrossCoreSetFlag<0, PIPE_MTE3>(3);
  if (!seeded) CrossCoreWaitFlag(3);
  if (GetBlockIdx() == 0) fill(pipe, arguments.y);
}

void flag_of_sync_all(const Arguments& arguments, bool seeded) {
  TPipe pipe;
  const uint16_t flag = seeded ? 12 : 10;
  CrossCoreSetFlag<0, PIPE_MTE3>(flag);
  CrossCoreWaitFlag(flag);
  if (GetBlockIdx() == 0) fill(pipe, arguments.y);
}

template <Step step>
constexpr Bug kPass = {Cores::kVector, 1, pass<step>};

const AddBugs add({
    {"input_to_vector", kPass<kInputToVector>},
    {"vector_to_vector", kPass<kVectorToVector>},
    {"output_to_vector", {Cores::kVector, 1, output_to_vector}},
    {"output_to_input", kPass<kOutputToInput>},
    {"wait_without_set", kPass<kWaitWithoutSet>},
    {"set_without_wait", kPass<kSetWithoutWait>},
    {"set_twice", kPass<kSetTwice>},
    {"event_out_of_range", kPass<kEventOutOfRange>},
    {"vector_to_output", {Cores::kVector, 1, vector_to_output}},
    {"vector_in_place", {Cores::kVector, 1, vector_in_place}},
    {"vector_to_scalar", {Cores::kVector, 1, scalar<kVectorToScalar>}},
    {"scalar_to_vector", {Cores::kVector, 1, scalar<kScalarToVector>}},
    {"vector_to_input", {Cores::kVector, 1, vector_to_input}},
    {"output_to_output", {Cores::kVector, 1, output_to_output}},
    {"events_exhausted", {Cores::kVector, 1, events_exhausted, Use::kWorkspace}},
    {"between_cores", {Cores::kVector, 2, between_cores}},
    {"same_output", {Cores::kVector, 2, same_output}},
    {"deadlock", {Cores::kVector, 2, deadlock}},
    {"flag_never_taken", {Cores::kVector, 2, flag_never_taken}},
    {"flag_of_sync_all", {Cores::kVector, 2, flag_of_sync_all}},
});

}  // namespace
}  // namespace twin_tests
