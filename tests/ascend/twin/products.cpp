// Products on the cube core, for test_twin_cube.py.
#include <algorithm>

#include "harness.h"
#include "json.h"

namespace twin_tests {
namespace {

constexpr int up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class Queue>
auto sent(Queue& queue, const LocalTensor<float>& tensor) {
  queue.EnQue(tensor);
  return queue.template DeQue<float>();
}

void store_product(float* out, TQue<TPosition::CO1, 1>& queue, LocalTensor<float> c, int m, int n) {
  c = sent(queue, c);
  FixpipeParamsV220 fix;
  fix.nSize = n, fix.mSize = m, fix.srcStride = up(m, 16), fix.dstStride = n;
  GlobalTensor<float> to;
  to.SetGlobalBuffer(out);
  Fixpipe(to, c, fix);
  queue.FreeTensor(c);
}

// From a row-major matrix to L1: one NZ matrix, or one of every `part` rows.
template <class T, class Queue>
void load_nz(Queue& queue, uint8_t* data, int height, int width, int part) {
  LocalTensor<T> local = queue.template AllocTensor<T>();
  Nd2NzParams p;
  p.ndNum = 1, p.dValue = width, p.srcDValue = width, p.dstNzC0Stride = up(part, 16), p.dstNzNStride = 1;
  for (int row = 0; row < height; row += part) {
    p.nValue = std::min(part, height - row);
    DataCopy(local[row * up(width, 16)], all_of<T>(data)[row * width], p);
  }
  queue.EnQue(local);
}

// `count` fractals, or squares of them, transposed.
template <class T>
void load_fractals(const LocalTensor<T>& to, const LocalTensor<T>& from, int count, int stride, bool transposed) {
  LoadData2DParams p;
  p.repeatTimes = count, p.srcStride = stride, p.ifTranspose = transposed;
  LoadData(to, from, p);
}

template <class T>
void load_squares(const LocalTensor<T>& to, const LocalTensor<T>& from, int first, int count, int stride, int gap,
                  int half_gap) {
  LoadData2dTransposeParams p;
  p.startIndex = first, p.repeatTimes = count, p.srcStride = stride, p.dstGap = gap, p.dstFracGap = half_gap;
  LoadDataWithTranspose(to, from, p);
}

// C [m, n] = A · B, or twice that. A is [m, k] or, across, [k, m]; B is [n, k] or, across, [k, n].
template <class T>
void product(uint8_t* out, uint8_t* left, uint8_t* right, int m, int n, int k, bool a_across, bool b_across,
             bool twice) {
  constexpr int kC0 = 32 / sizeof(T);
  constexpr bool kSquares = sizeof(T) == 4;
  const int rows = up(m, 16) / 16, columns = up(n, 16) / 16, depths = up(k, 16) / 16, steps = up(k, kC0) / kC0;
  TPipe pipe;
  TQue<TPosition::A1, 1> a1;
  TQue<TPosition::B1, 1> b1;
  TQue<TPosition::A2, 1> a2;
  TQue<TPosition::B2, 1> b2;
  TQue<TPosition::CO1, 1> co;
  pipe.InitBuffer(a1, 1, rows * depths * 256 * sizeof(T));
  pipe.InitBuffer(b1, 1, columns * depths * 256 * sizeof(T));
  pipe.InitBuffer(a2, 1, rows * depths * 256 * sizeof(T));
  pipe.InitBuffer(b2, 1, columns * depths * 256 * sizeof(T));
  pipe.InitBuffer(co, 1, rows * columns * 256 * sizeof(float));
  SetHF32Mode(HF32Mode::DISABLE);
  if (m == 1) {  // k elements, one after the other
    load_nz<T>(a1, left, steps, std::min(k, kC0), steps);
  } else {
    a_across ? load_nz<T>(a1, left, k, m, kSquares ? 16 : k) : load_nz<T>(a1, left, m, k, m);
  }
  b_across ? load_nz<T>(b1, right, k, n, kSquares ? 16 : k) : load_nz<T>(b1, right, n, k, n);
  LocalTensor<T> al = a1.template DeQue<T>(), bl = b1.template DeQue<T>();
  LocalTensor<T> a = a2.template AllocTensor<T>(), b = b2.template AllocTensor<T>();
  if (m == 1) load_fractals(a, al, up(steps, 16) / 16, 1, false);
  for (int row = 0; m > 1 && row < rows; ++row) {
    if (!a_across) {
      load_fractals(a[row * steps * 16 * kC0], al[row * 16 * kC0], steps, rows, false);
    } else if constexpr (kSquares) {
      load_squares(a[row * depths * 256], al, row, depths, rows, 1, 0);
    } else {
      load_fractals(a[row * depths * 256], al[row * depths * 256], depths, 1, true);
    }
  }
  if (!b_across) load_fractals(b, bl, steps * columns, 1, false);
  for (int d = 0; b_across && d < depths; ++d) {
    if constexpr (kSquares) {
      load_squares(b[d * columns * 256], bl, d * columns, columns, 1, 0, columns - 1);
    } else {
      load_fractals(b[d * columns * 256], bl[d * 256], columns, depths, true);
    }
  }
  a1.FreeTensor(al);
  b1.FreeTensor(bl);
  a2.EnQue(a);
  b2.EnQue(b);
  a = a2.template DeQue<T>(), b = b2.template DeQue<T>();
  LocalTensor<float> c = co.template AllocTensor<float>();
  MmadParams mmad;
  mmad.m = m, mmad.n = n, mmad.k = k, mmad.kDirectionAlign = a_across;
  Mmad(c, a, b, mmad);
  mmad.cmatrixInitVal = false;
  if (twice) {
    PipeBarrier<PIPE_M>();
    Mmad(c, a, b, mmad);
  }
  a2.FreeTensor(a);
  b2.FreeTensor(b);
  store_product(reinterpret_cast<float*>(out), co, c, m, n);
}

// out [16, k]: the fractals in L0A after `i` = first, count, stride, gap, half gap of squares from L1, where `in` lies
// as it is; before, each was the first one of L1. `identity` is [k, k].
void squares(uint8_t* out, uint8_t* in, uint8_t* identity, const int64_t* i, int k) {
  TPipe pipe;
  TQue<TPosition::A1, 1> a1;
  TQue<TPosition::B1, 1> b1;
  TQue<TPosition::A2, 1> a2;
  TQue<TPosition::B2, 1> b2;
  TQue<TPosition::CO1, 1> co;
  pipe.InitBuffer(a1, 1, kOperandBytes);
  pipe.InitBuffer(b1, 1, k * k * sizeof(float));
  pipe.InitBuffer(a2, 1, 16 * k * sizeof(float));
  pipe.InitBuffer(b2, 1, k * k * sizeof(float));
  pipe.InitBuffer(co, 1, 16 * k * sizeof(float));
  SetHF32Mode(HF32Mode::DISABLE);
  load_nz<float>(a1, in, kOperandBytes / 32, 8, kOperandBytes / 32);
  load_nz<float>(b1, identity, k, k, k);
  LocalTensor<float> al = a1.DeQue<float>(), bl = b1.DeQue<float>();
  LocalTensor<float> a = a2.AllocTensor<float>(), b = b2.AllocTensor<float>();
  load_fractals(a, al, k / 8, 0, false);
  PipeBarrier<PIPE_MTE1>();
  load_squares(a, al, i[0], i[1], i[2], i[3], i[4]);
  load_fractals(b, bl, k / 8 * (k / 16), 1, false);
  a1.FreeTensor(al);
  b1.FreeTensor(bl);
  a = sent(a2, a), b = sent(b2, b);
  LocalTensor<float> c = co.AllocTensor<float>();
  MmadParams mmad;
  mmad.m = 16, mmad.n = k, mmad.k = k;
  Mmad(c, a, b, mmad);
  a2.FreeTensor(a);
  b2.FreeTensor(b);
  store_product(reinterpret_cast<float*>(out), co, c, 16, k);
}

}  // namespace
}  // namespace twin_tests

using namespace twin_tests;

extern "C" {

char* twin_product(const char* type, uint8_t* out, uint8_t* a, uint8_t* b, int m, int n, int k, bool a_across,
                   bool b_across, bool twice) {
  const std::string name = type;
  const uint64_t bytes = name == "float32" ? 4 : 2;
  const auto kernel = [&] {
    if ASCEND_IS_AIV
      return;
    if (name == "float32") product<float>(out, a, b, m, n, k, a_across, b_across, twice);
    if (name == "float16") product<half>(out, a, b, m, n, k, a_across, b_across, twice);
    if (name == "bfloat16") product<bfloat16_t>(out, a, b, m, n, k, a_across, b_across, twice);
  };
  return ascend_twin::to_c_string(ascend_twin::launch({"product"}, Cores::kMixed, 1,
                                                      {{"out", out, uint64_t(m) * n * 4, Use::kOutput},
                                                       {"a", a, bytes * m * k, Use::kInput},
                                                       {"b", b, bytes * n * k, Use::kInput}},
                                                      kernel));
}

char* twin_squares(uint8_t* out, uint8_t* in, uint8_t* identity, const int64_t* integers, int k) {
  const auto kernel = [&] {
    if ASCEND_IS_AIC
      squares(out, in, identity, integers, k);
  };
  return ascend_twin::to_c_string(ascend_twin::launch({"squares"}, Cores::kMixed, 1,
                                                      {{"out", out, uint64_t(16) * k * 4, Use::kOutput},
                                                       {"in", in, kOperandBytes, Use::kInput},
                                                       {"identity", identity, uint64_t(k) * k * 4, Use::kInput}},
                                                      kernel));
}
}
