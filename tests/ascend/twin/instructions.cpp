// Runs one vector instruction on arrays, for test_twin_instructions.py.
#include <functional>

#include "harness.h"
#include "json.h"

namespace twin_tests {
namespace {

// Operands in local memory, and the integers and the number that an instruction takes.
struct Operands {
  LocalTensor<uint8_t> out, a, b, work;
  const int64_t* integers;
  float number;

  template <class T>
  LocalTensor<T> dst() const {
    return out.ReinterpretCast<T>();
  }
  template <class T>
  LocalTensor<T> src0() const {
    return a.ReinterpretCast<T>();
  }
  template <class T>
  LocalTensor<T> src1() const {
    return b.ReinterpretCast<T>();
  }
  int32_t count() const { return integers[0]; }

  // integers: mask, repeats, block strides, repeat strides
  BinaryRepeatParams binary() const {
    const int64_t* i = integers + 2;
    return BinaryRepeatParams(i[0], i[1], i[2], i[3], i[4], i[5]);
  }
  UnaryRepeatParams unary() const {
    const int64_t* i = integers + 2;
    return UnaryRepeatParams(i[0], i[1], i[2], i[3]);
  }
};

using Instructions = std::map<std::string, std::function<void(const Operands&)>>;

template <class T>
void add_arithmetic(Instructions& all, const std::string& type) {
#define ADD_BINARY(NAME)                                                                                    \
  all[#NAME "." + type] = [](const Operands& o) { NAME(o.dst<T>(), o.src0<T>(), o.src1<T>(), o.count()); }; \
  all[#NAME ".masked." + type] = [](const Operands& o) {                                                    \
    NAME(o.dst<T>(), o.src0<T>(), o.src1<T>(), o.integers[0], o.integers[1], o.binary());                   \
  };
  ADD_BINARY(Add)
  ADD_BINARY(Sub)
  ADD_BINARY(Mul)
  ADD_BINARY(Max)
  ADD_BINARY(Min)
  if constexpr (std::is_same_v<T, half> || std::is_same_v<T, float>) {
    ADD_BINARY(Div)
  }
#undef ADD_BINARY
#define ADD_SCALAR(NAME)                                                                                    \
  all[#NAME "." + type] = [](const Operands& o) { NAME(o.dst<T>(), o.src0<T>(), T(o.number), o.count()); }; \
  all[#NAME ".masked." + type] = [](const Operands& o) {                                                    \
    NAME(o.dst<T>(), o.src0<T>(), T(o.number), o.integers[0], o.integers[1], o.unary());                    \
  };
  ADD_SCALAR(Adds)
  ADD_SCALAR(Muls)
  ADD_SCALAR(Maxs)
  ADD_SCALAR(Mins)
#undef ADD_SCALAR
  all["Duplicate." + type] = [](const Operands& o) { Duplicate(o.dst<T>(), T(o.number), o.count()); };
  all["Duplicate.masked." + type] = [](const Operands& o) {
    uint64_t mask[2] = {uint64_t(o.integers[0]), uint64_t(o.integers[1])};
    Duplicate(o.dst<T>(), T(o.number), mask, o.integers[2], o.integers[3], o.integers[4]);
  };
}

template <class T>
void add_functions(Instructions& all, const std::string& type) {
#define ADD_UNARY(NAME) all[#NAME "." + type] = [](const Operands& o) { NAME(o.dst<T>(), o.src0<T>(), o.count()); };
  ADD_UNARY(Exp)
  ADD_UNARY(Ln)
  ADD_UNARY(Sqrt)
  ADD_UNARY(Abs)
#undef ADD_UNARY
  all["Axpy." + type] = [](const Operands& o) { Axpy(o.dst<T>(), o.src0<T>(), T(o.number), o.count()); };
  all["ReduceSum." + type] = [](const Operands& o) {
    ReduceSum(o.dst<T>()[o.integers[1]], o.src0<T>(), o.work.ReinterpretCast<T>(), o.count());
  };
  all["ReduceMax." + type] = [](const Operands& o) {
    ReduceMax(o.dst<T>()[o.integers[1]], o.src0<T>(), o.work.ReinterpretCast<T>(), o.count());
  };
  all["WholeReduceSum." + type] = [](const Operands& o) {
    const int64_t* i = o.integers;
    WholeReduceSum(o.dst<T>(), o.src0<T>(), int32_t(i[0]), int32_t(i[1]), int32_t(i[2]), int32_t(i[3]), int32_t(i[4]));
  };
  all["Brcb." + type] = [](const Operands& o) {
    Brcb(o.dst<T>(), o.src0<T>(), o.integers[0], BrcbRepeatParams(o.integers[1], o.integers[2]));
  };
  all["Gather." + type] = [](const Operands& o) {
    Gather(o.dst<T>(), o.src0<T>(), o.src1<uint32_t>(), o.integers[1], o.integers[0]);
  };
  all["CompareScalar." + type] = [](const Operands& o) {
    CompareScalar(o.dst<uint8_t>(), o.src0<T>(), T(o.number), CMPMODE(o.integers[1]), o.integers[0]);
  };
  all["Select." + type] = [](const Operands& o) {
    Select(o.dst<T>(), o.src1<uint8_t>(), o.src0<T>(), T(o.number), SELMODE::VSEL_TENSOR_SCALAR_MODE, o.integers[0]);
  };
}

template <class D, class S>
void add_cast(Instructions& all, const std::string& types) {
  all["Cast." + types] = [](const Operands& o) {
    Cast(o.dst<D>(), o.src0<S>(), RoundMode(o.integers[1]), o.integers[0]);
  };
}

Instructions all_instructions() {
  Instructions all;
  add_arithmetic<float>(all, "float32");
  add_arithmetic<half>(all, "float16");
  add_arithmetic<int32_t>(all, "int32");
  add_functions<float>(all, "float32");
  add_functions<half>(all, "float16");
  add_cast<half, float>(all, "float32.float16");
  add_cast<bfloat16_t, float>(all, "float32.bfloat16");
  add_cast<float, float>(all, "float32.float32");
  add_cast<int32_t, float>(all, "float32.int32");
  add_cast<int16_t, float>(all, "float32.int16");
  add_cast<float, half>(all, "float16.float32");
  add_cast<float, bfloat16_t>(all, "bfloat16.float32");
  add_cast<float, int32_t>(all, "int32.float32");
  return all;
}

GlobalTensor<uint8_t> bytes_of(uint8_t* data) {
  GlobalTensor<uint8_t> tensor;
  tensor.SetGlobalBuffer(data, kOperandBytes);
  return tensor;
}

// rows, length, gap in the matrix, left and right padding, whether to pad
template <class T>
void pad_copy(uint8_t* out, uint8_t* in, const int64_t* i, float value) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, kOperandBytes);
  const LocalTensor<T> local = memory.Get<T>();
  Duplicate(local.template ReinterpretCast<float>(), -1.0f, kOperandBytes / 4);
  SetFlag<HardEvent::V_MTE2>(EVENT_ID0);
  WaitFlag<HardEvent::V_MTE2>(EVENT_ID0);
  const DataCopyExtParams rows(i[0], i[1] * sizeof(T), i[2] * sizeof(T), i[6], 0);
  DataCopyPad(local, all_of<T>(in), rows, DataCopyPadExtParams<T>(i[5], i[3], i[4], T(value)));
  SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  DataCopy(bytes_of(out), memory.Get<uint8_t>(), kOperandBytes);
}

// rows, length, gap in the output, gap in local memory
template <class T>
void pad_store(uint8_t* out, uint8_t* in, const int64_t* i) {
  TPipe pipe;
  TBuf<> memory;
  pipe.InitBuffer(memory, kOperandBytes);
  DataCopy(memory.Get<uint8_t>(), bytes_of(in), kOperandBytes);
  SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  DataCopyPad(all_of<T>(out), memory.Get<T>(), DataCopyExtParams(i[0], i[1] * sizeof(T), i[3], i[2] * sizeof(T), 0));
}

}  // namespace
}  // namespace twin_tests

using namespace twin_tests;

extern "C" {

// Arrays of kOperandBytes bytes; `out` goes in and out.
char* twin_instruction(const char* name, uint8_t* out, uint8_t* a, uint8_t* b, const int64_t* integers, float number) {
  static const Instructions instructions = all_instructions();
  const auto kernel = [&] {
    TPipe pipe;
    TBuf<> memory[4];
    for (TBuf<>& m : memory) pipe.InitBuffer(m, kOperandBytes);
    const auto get = [&](int i) { return memory[i].Get<uint8_t>(); };
    const Operands operands{get(0), get(1), get(2), get(3), integers, number};
    DataCopy(operands.out, bytes_of(out), kOperandBytes);
    DataCopy(operands.a, bytes_of(a), kOperandBytes);
    DataCopy(operands.b, bytes_of(b), kOperandBytes);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    instructions.at(name)(operands);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(bytes_of(out), operands.out, kOperandBytes);
  };
  return ascend_twin::to_c_string(ascend_twin::launch({name}, Cores::kVector, 1,
                                                      {{"out", out, kOperandBytes, Use::kInOut},
                                                       {"a", a, kOperandBytes, Use::kInput},
                                                       {"b", b, kOperandBytes, Use::kInput}},
                                                      kernel));
}

char* twin_pad_copy(bool is_half, uint8_t* out, uint8_t* in, const int64_t* integers, float value) {
  return ascend_twin::to_c_string(ascend_twin::launch(
      {"pad_copy"}, Cores::kVector, 1,
      {{"out", out, kOperandBytes, Use::kOutput}, {"in", in, kOperandBytes, Use::kInput}},
      [&] { is_half ? pad_copy<half>(out, in, integers, value) : pad_copy<float>(out, in, integers, value); }));
}

char* twin_pad_store(bool is_half, uint8_t* out, uint8_t* in, const int64_t* integers) {
  return ascend_twin::to_c_string(
      ascend_twin::launch({"pad_store"}, Cores::kVector, 1,
                          {{"out", out, kOperandBytes, Use::kInOut}, {"in", in, kOperandBytes, Use::kInput}},
                          [&] { is_half ? pad_store<half>(out, in, integers) : pad_store<float>(out, in, integers); }));
}
}
