// What the SwiGLU operator hands to its kernels.
#pragma once

#include "common/dispatch.h"
#include "common/scalar_types.h"

namespace mindspeed::cpu {

// y = silu(gate) · up. Items are rows.
struct SwigluForward {
  int64_t length;
  DType type;
  InputRows gate, up;  // [rows, length]
  OutputRows y;        // [rows, length]
};

// The gradients of gate and up. Items are rows.
struct SwigluBackward {
  int64_t length;
  DType type;
  InputRows grad_y, gate, up;     // [rows, length]
  OutputRows grad_gate, grad_up;  // [rows, length]
};

MINDSPEED_KERNEL(swiglu_forward_kernel, SwigluForward)
MINDSPEED_KERNEL(swiglu_backward_kernel, SwigluBackward)

}  // namespace mindspeed::cpu
