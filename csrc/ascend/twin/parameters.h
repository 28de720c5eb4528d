// The enumerations and parameter structures of the AscendC interface, as far as the twin goes. The constructors are
// there because the real structures have them: with an aggregate, calls would compile here that do not compile there.
#pragma once

#include <cstdint>

#include "hardware.h"
#include "scalar_types.h"

enum QuantMode_t { NoQuant, F322F16, F322BF16 };

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, CO1, VECIN, VECOUT, VECCALC };

// SRC_DST: what SRC has done before SetFlag is done before what DST does after WaitFlag.
enum class HardEvent : uint8_t {
  MTE2_MTE1,
  MTE1_MTE2,
  MTE1_M,
  M_MTE1,
  M_FIX,
  FIX_M,
  MTE2_V,
  V_MTE2,
  V_MTE3,
  MTE3_V,
  MTE2_MTE3,
  MTE3_MTE2,
  S_V,
  V_S,
  S_MTE2,
  MTE2_S,
  S_MTE3,
  MTE3_S,
  FIX_MTE2,
  MTE2_FIX,
};

enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

// Vector instructions: distances in blocks of 32 bytes between the 8 blocks of a repeat and between repeats. A source's
// distance 0 reads the same block again.
struct UnaryRepeatParams {
  uint16_t dstBlkStride = 1, srcBlkStride = 1;
  uint8_t dstRepStride = 8, srcRepStride = 8;

  UnaryRepeatParams() {}
  UnaryRepeatParams(uint16_t dst_block, uint16_t src_block, uint8_t dst_repeat, uint8_t src_repeat)
      : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat) {}
};

struct BinaryRepeatParams {
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;

  BinaryRepeatParams() {}
  BinaryRepeatParams(uint8_t dst_block, uint8_t src0_block, uint8_t src1_block, uint8_t dst_repeat, uint8_t src0_repeat,
                     uint8_t src1_repeat)
      : dstBlkStride(dst_block),
        src0BlkStride(src0_block),
        src1BlkStride(src1_block),
        dstRepStride(dst_repeat),
        src0RepStride(src0_repeat),
        src1RepStride(src1_repeat) {}
};

struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1, dstRepStride = 8;

  BrcbRepeatParams() {}
  BrcbRepeatParams(uint16_t dst_block, uint16_t dst_repeat) : dstBlkStride(dst_block), dstRepStride(dst_repeat) {}
};

// Copies of rows of whole blocks: lengths and the gaps between rows in blocks of 32 bytes.
struct DataCopyParams {
  uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;

  DataCopyParams() {}
  DataCopyParams(uint16_t count, uint16_t length, uint16_t src_gap, uint16_t dst_gap)
      : blockCount(count), blockLen(length), srcStride(src_gap), dstStride(dst_gap) {}
};

// Copies of rows of any length: lengths and gaps in global memory in bytes, gaps in local memory in blocks. A row
// takes whole blocks of local memory.
struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;

  DataCopyExtParams() {}
  DataCopyExtParams(uint16_t count, uint32_t length, uint32_t src_gap, uint32_t dst_gap, uint32_t reserved)
      : blockCount(count), blockLen(length), srcStride(src_gap), dstStride(dst_gap), rsv(reserved) {}
};

// What surrounds a row in local memory: leftPadding and rightPadding elements of paddingValue.
template <class T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue{};

  DataCopyPadExtParams() {}
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

// From row-major matrices (ND) to columns of 32 bytes (NZ): sizes in elements, dstNzC0Stride and dstNzNStride in 32
// bytes: from one column of blocks to the next, and from row to row.
struct Nd2NzParams {
  uint16_t ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0;
  uint16_t dstNzC0Stride = 0, dstNzNStride = 0, dstNzMatrixStride = 0;

  Nd2NzParams() {}
};

// Copies of 512-byte fractals, counted in fractals; dstGap is a gap, srcStride a distance.
struct LoadData2DParams {
  uint16_t startIndex = 0, dstGap = 0, srcStride = 0;
  bool ifTranspose = false;
  uint8_t repeatTimes = 0, sid = 0, addrMode = 0;

  LoadData2DParams() {}
};

// Squares of 16 x 16 elements, counted in squares; gaps counted in fractals: dstFracGap between the two of a square,
// dstGap between the first ones of squares.
struct LoadData2dTransposeParams {
  uint16_t startIndex = 0;
  uint8_t repeatTimes = 0;
  uint16_t srcStride = 0, dstGap = 0, dstFracGap = 0;
  uint8_t addrMode = 0;

  LoadData2dTransposeParams() {}
};

// Whether products round float operands to HF32, which is twice as fast.
enum class HF32Mode { ENABLE, DISABLE };

// C [m, n] = A [m, k] · B [k, n], added to C unless cmatrixInitVal. kDirectionAlign: rows of float fractals in L0A take
// an even number of them.
struct MmadParams {
  uint16_t m = 0, n = 0, k = 0;
  bool isBias = false;
  int32_t fmOffset = 0;
  bool enSsparse = false, enWinogradA = false, enWinogradB = false;
  uint8_t unitFlag = 0;
  bool kDirectionAlign = false, cmatrixSource = false, cmatrixInitVal = true;

  MmadParams() {}
};

// From L0C to rows in global memory: srcStride in 16 elements (the rows of C, rounded up to 16), dstStride in elements.
struct FixpipeParamsV220 {
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
  QuantMode_t quantPre = NoQuant;
  uint64_t deqScalar = 0;
  uint16_t ndNum = 1, srcNdStride = 0, dstNdStride = 0;
  bool reluEn = false;
  uint8_t unitFlag = 0;
  bool isChannelSplit = false;

  FixpipeParamsV220() {}
};

}  // namespace AscendC

namespace ascend_twin {

struct EventPipes {
  pipe_t source, destination;
};

constexpr EventPipes kEventPipes[] = {
    {PIPE_MTE2, PIPE_MTE1}, {PIPE_MTE1, PIPE_MTE2}, {PIPE_MTE1, PIPE_M}, {PIPE_M, PIPE_MTE1},   {PIPE_M, PIPE_FIX},
    {PIPE_FIX, PIPE_M},     {PIPE_MTE2, PIPE_V},    {PIPE_V, PIPE_MTE2}, {PIPE_V, PIPE_MTE3},   {PIPE_MTE3, PIPE_V},
    {PIPE_MTE2, PIPE_MTE3}, {PIPE_MTE3, PIPE_MTE2}, {PIPE_S, PIPE_V},    {PIPE_V, PIPE_S},      {PIPE_S, PIPE_MTE2},
    {PIPE_MTE2, PIPE_S},    {PIPE_S, PIPE_MTE3},    {PIPE_MTE3, PIPE_S}, {PIPE_FIX, PIPE_MTE2}, {PIPE_MTE2, PIPE_FIX},
};

constexpr EventPipes pipes_of(AscendC::HardEvent event) { return kEventPipes[int(event)]; }

}  // namespace ascend_twin
