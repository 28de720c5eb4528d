// The matrix instructions of a cube core: L1 to L0A and L0B, the product, L0C to global memory.
//
// Operands are cut into fractals of 512 bytes: 16 rows of 32 bytes (C0 = 32 / sizeof(T) elements). With M1 = ⌈m / 16⌉
// and so on:
//   L0A (Zz)  [M1, K1, 16 m, C0 k]      L0B (Zn)  [K1, N1, 16 n, C0 k]      L0C (Nz)  [N1, M1, 16 m, 16 n]
#pragma once

#include <vector>

#include "data_copy.h"

namespace AscendC {

// Fractals from L1 to L0A or L0B, transposed on the way if asked for.
template <class T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& params,
              ascend_twin::Site site = ascend_twin::Site::here()) {
  constexpr uint64_t kElements = 512 / sizeof(T);
  const ascend_twin::Instruction op("LoadData", PIPE_MTE1, site);
  op.require(src.GetPosition() == TPosition::A1 || src.GetPosition() == TPosition::B1, "src is not in L1");
  op.require(dst.GetPosition() == TPosition::A2 || dst.GetPosition() == TPosition::B2, "dst is not in L0A or L0B");
  op.require(!params.ifTranspose || sizeof(T) == 2, "only elements of 2 bytes can be transposed");
  op.require(params.addrMode == 0, "descending fractals are not in the twin");
  for (uint64_t repeat = 0; repeat < params.repeatTimes; ++repeat) {
    const uint64_t first = (params.startIndex + repeat * params.srcStride) * kElements;
    const T* in = op.read("src", src, first, kElements, 0, true);  // fractals may reach past the matrix
    T* out = op.write("dst", dst, repeat * (params.dstGap + 1) * kElements, kElements);
    for (uint64_t i = 0; i < kElements; ++i) out[params.ifTranspose ? i % 16 * 16 + i / 16 : i] = in[i];
  }
  ascend_twin::core().counters.l1_read += uint64_t(params.repeatTimes) * 512;
}

// Squares of 16 x 16 elements from L1 to L0A or L0B, transposed: two fractals that follow each other in L1, the left
// and the right half, become the left and the right half of the transpose.
template <class T>
void LoadDataWithTranspose(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                           const LoadData2dTransposeParams& params,
                           ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(sizeof(T) == 4, "squares of other elements than those of 4 bytes are not in the twin");
  constexpr uint64_t kC0 = ascend_twin::kBlockElements<T>, kRows = ascend_twin::kFractal, kElements = kRows * kC0;
  const ascend_twin::Instruction op("LoadDataWithTranspose", PIPE_MTE1, site);
  op.require(src.GetPosition() == TPosition::A1 || src.GetPosition() == TPosition::B1, "src is not in L1");
  op.require(dst.GetPosition() == TPosition::A2 || dst.GetPosition() == TPosition::B2, "dst is not in L0A or L0B");
  op.require(params.addrMode == 0, "descending squares are not in the twin");
  for (uint64_t repeat = 0; repeat < params.repeatTimes; ++repeat) {
    const uint64_t first = (params.startIndex + repeat * params.srcStride) * kRows * kRows;
    const T* in = op.read("src", src, first, kRows * kRows, 0, true);  // squares may reach past the matrix
    for (uint64_t half = 0; half < 2; ++half) {
      const uint64_t fractal = repeat * (params.dstGap + 1) + half * (params.dstFracGap + 1);
      T* out = op.write("dst", dst, fractal * kElements, kElements);
      for (uint64_t row = 0; row < kRows; ++row) {
        const T* column = in + row / kC0 * kElements + row % kC0;  // of the square
        for (uint64_t i = 0; i < kC0; ++i) out[row * kC0 + i] = column[(half * kC0 + i) * kC0];
      }
    }
  }
  ascend_twin::core().counters.l1_read += uint64_t(params.repeatTimes) * kRows * kRows * sizeof(T);
}

// A kernel that was here before may have left it on: the twin multiplies no floats before this has been called.
inline void SetHF32Mode(HF32Mode mode, ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("SetHF32Mode", PIPE_S, site);
  op.require(mode == HF32Mode::DISABLE, "rounding to HF32 is not in the twin");
  ascend_twin::core().full_float = true;
}

}  // namespace AscendC

namespace ascend_twin {

// The operands of a product as rows of float32: those of A [m, k] and those of Bᵀ [n, k]. Only what takes part is read.
template <class T>
struct ProductOperands {
  static constexpr uint64_t kC0 = kBlockElements<T>, kElements = kFractal * kC0;

  std::vector<float> rows, columns;

  ProductOperands(const Instruction& op, const AscendC::LocalTensor<T>& a, const AscendC::LocalTensor<T>& b,
                  const AscendC::MmadParams& params)
      : rows(uint64_t(params.m) * params.k), columns(uint64_t(params.n) * params.k) {
    const uint64_t m = params.m, n = params.n, k = params.k;
    const uint64_t depths = (k + kC0 - 1) / kC0, across = (n + kFractal - 1) / kFractal;
    if (m == 1) {  // one run of k elements instead of fractals
      const T* run = op.read("A", a, 0, k);
      for (uint64_t d = 0; d < k; ++d) rows[d] = run[d];
    }
    const uint64_t width = params.kDirectionAlign ? round_up(k, kFractal) / kC0 : depths;  // of a row of fractals
    for (uint64_t first = 0; m > 1 && first < m; first += kFractal) {
      const T* fractals = op.read("A", a, first / kFractal * width * kElements, depths * kElements);
      for (uint64_t i = first; i < std::min(m, first + kFractal); ++i) {
        for (uint64_t d = 0; d < k; ++d) rows[i * k + d] = fractals[element(d / kC0, i, d)];
      }
    }
    const T* fractals = op.read("B", b, 0, depths * across * kElements);
    for (uint64_t j = 0; j < n; ++j) {
      for (uint64_t d = 0; d < k; ++d) {
        columns[j * k + d] = fractals[element(d / kC0 * across + j / kFractal, j, d)];
      }
    }
  }

 private:
  static uint64_t element(uint64_t fractal, uint64_t row, uint64_t depth) {
    return fractal * kElements + row % kFractal * kC0 + depth % kC0;
  }
};

}  // namespace ascend_twin

namespace AscendC {

// C [m, n] (+)= A [m, k] · B [k, n], in float32. Rows, columns and depths past m, n and k take no part. A single row
// (m = 1) is no row of fractals in L0A, but k elements one after the other.
template <class C, class A, class B>
void Mmad(const LocalTensor<C>& dst, const LocalTensor<A>& a, const LocalTensor<B>& b, const MmadParams& params,
          ascend_twin::Site site = ascend_twin::Site::here()) {
  static_assert(std::is_same_v<A, B> && std::is_same_v<C, float>, "Mmad of one type, into float");
  static_assert(std::is_same_v<A, half> || std::is_same_v<A, bfloat16_t> || std::is_same_v<A, float>,
                "Mmad: wrong type");
  constexpr uint64_t kC0 = ascend_twin::kBlockElements<A>, kRows = ascend_twin::kFractal;
  const ascend_twin::Instruction op("Mmad", PIPE_M, site);
  op.require(
      a.GetPosition() == TPosition::A2 && b.GetPosition() == TPosition::B2 && dst.GetPosition() == TPosition::CO1,
      "operands have to be in L0A, L0B and L0C");
  const uint64_t m = params.m, n = params.n, k = params.k;
  op.require(m <= 4095 && n <= 4095 && k <= 4095, "m, n and k are at most 4095, not ", m, ", ", n, ", ", k);
  if (m == 0 || n == 0 || k == 0) return;
  ascend_twin::Core& core = ascend_twin::core();
  op.require(core.full_float || !std::is_same_v<A, float>,
             "floats may be rounded to HF32: SetHF32Mode(HF32Mode::DISABLE) was not called");
  // Products that are large enough follow each other in order; small ones need a barrier to accumulate.
  if ((m / kRows) * (n / kRows) >= 10) core.clocks[PIPE_M].advance(core.agent(PIPE_M), core.issued[PIPE_M] - 1);
  const ascend_twin::ProductOperands<A> operands(op, a, b, params);
  const uint64_t m1 = (m + kRows - 1) / kRows, n1 = (n + kRows - 1) / kRows, size = m1 * n1 * kRows * kRows;
  if (!params.cmatrixInitVal) op.read("C", dst, 0, size);
  float* out = op.write("C", dst, 0, size, 1024);
  for (uint64_t i = 0; i < m; ++i) {
    const float* row = &operands.rows[i * k];
    for (uint64_t j = 0; j < n; ++j) {
      const float* column = &operands.columns[j * k];
      float& c = out[((j / kRows * m1 + i / kRows) * kRows + i % kRows) * kRows + j % kRows];
      float sum = params.cmatrixInitVal ? 0.0f : c;
      for (uint64_t d = 0; d < k; ++d) sum += row[d] * column[d];
      c = sum;
    }
  }
  core.counters.cube_flops += 2 * m * n * k;
  core.counters.cube_flops_padded += 2 * (m1 * kRows) * (n1 * kRows) * ascend_twin::round_up(k, kC0);
}

// The first mSize rows and nSize columns of C to rows in global memory, rounded to its type, or added there.
template <class T>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<float>& src, const FixpipeParamsV220& params,
             ascend_twin::Site site = ascend_twin::Site::here()) {
  const ascend_twin::Instruction op("Fixpipe", PIPE_FIX, site);
  constexpr QuantMode_t kQuant = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
  op.require(params.quantPre == kQuant, "quantPre does not fit the type in global memory");
  op.require(params.ndNum == 1 && !params.reluEn && !params.isChannelSplit, "this option is not in the twin");
  op.require(params.srcStride % ascend_twin::kFractal == 0 && params.srcStride >= params.mSize,
             "srcStride has to be mSize rounded up to 16");
  op.require(src.GetPosition() == TPosition::CO1, "src is not in L0C");
  std::vector<T> row(params.nSize);
  for (uint64_t i = 0; i < params.mSize; ++i) {
    for (uint64_t j = 0; j < params.nSize; j += ascend_twin::kFractal) {
      const uint64_t count = std::min<uint64_t>(ascend_twin::kFractal, params.nSize - j);
      const uint64_t first = (j / ascend_twin::kFractal * params.srcStride + i) * ascend_twin::kFractal;
      std::transform(op.read("src", src, first, count), op.read("src", src, first, count) + count, row.begin() + j,
                     [](float x) { return T(x); });
    }
    op.store("dst", dst, i * params.dstStride, row.data(), params.nSize);
  }
}

}  // namespace AscendC
