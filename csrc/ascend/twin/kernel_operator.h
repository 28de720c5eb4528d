// A CPU twin of the part of AscendC that the kernels in csrc/ascend/kernels use, for dav-2201 (Atlas A2 and A3).
//
// It stands in for the header of this name in CANN: kernels include it, compile with any C++17 compiler, and run with
// one thread per core (launch.h). It does what the instructions do, and reports what the hardware would hang on, trap
// on or silently get wrong: memory that does not fit, misaligned or out-of-bounds operands, wrong use of queues, leaked
// buffers, flags without a partner, deadlocks, reads of what nobody wrote, and accesses without a flag or barrier in
// between (history.h), whether or not the numbers come out right on the CPU.
//
// Written for this project from the public documentation of the interface. docs/ascend.md says what a run on the twin
// proves and what it cannot.
#pragma once

#define __host__
#define __aicore__
#define __global__
#define __gm__

#include "cube.h"
#include "data_copy.h"
#include "hardware.h"
#include "parameters.h"
#include "queue.h"
#include "scalar_types.h"
#include "sync.h"
#include "tensor.h"
#include "vector.h"
#include "vector_convert.h"
#include "vector_reduce.h"
#include "vector_select.h"

using GM_ADDR = uint8_t*;
