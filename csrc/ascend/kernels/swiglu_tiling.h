// What the SwiGLU kernels are given besides their tensors.
#pragma once

#include "tiling.h"

namespace mindspeed::ascend {

struct SwigluTiling {
  Tiles tiles;
  int64_t gate_stride, up_stride;  // elements from row to row; of grad_gate and grad_up in backward too
};

// The rows of gate, up and y may lie next to each other in memory as one long row.
inline SwigluTiling swiglu_tiling(int64_t rows, int64_t length, int64_t gate_stride, int64_t up_stride,
                                  int64_t element_bytes, bool backward, int64_t cores) {
  if (gate_stride == length && up_stride == length) {
    length *= rows, rows = 1;
    gate_stride = up_stride = length;
  }
  const int64_t tensors = backward ? 5 : 3, scratch = backward ? 5 : 3;
  SwigluTiling tiling{tile(rows, length, {tensors * element_bytes, scratch * 4}, cores), gate_stride, up_stride};
  Tiles& tiles = tiling.tiles;
  // A single row is cut for all cores.
  const int64_t columns = round_up(ceil_div(length, cores), 256);
  if (rows < cores) tiles.columns = int32_t(smaller<int64_t>(tiles.columns, columns));
  // The gap between rows is 32 bits wide, in bytes.
  const int64_t gap = (larger(gate_stride, up_stride) - tiles.columns) * element_bytes;
  if (gap > int64_t(UINT32_MAX)) tiles.rows = 1;
  return tiling;
}

}  // namespace mindspeed::ascend
