// What the .asc files share. LAUNCH(cores, launch, kernel, ...) starts `kernel`, a function declared with __global__
// and the cores, on some Memory and a tiling.
#pragma once

#include "kernel_operator.h"
#include "launch.h"

#ifdef MINDSPEED_ASCEND_TWIN
#include "twin_launch.h"
#define VECTOR_CORES
#define SYNCHRONIZED_VECTOR_CORES
#define CUBE_CORES
#define MIXED_CORES
#define LAUNCH(CORES, HOW, KERNEL, ...) launch_on_twin(#KERNEL, Cores::CORES, HOW, KERNEL, __VA_ARGS__)
#else
#define VECTOR_CORES __vector__
#define SYNCHRONIZED_VECTOR_CORES __mix__(0, 1)
#define CUBE_CORES __cube__
#define MIXED_CORES __mix__(1, 2)
#define LAUNCH(CORES, HOW, KERNEL, ...) KERNEL<<<(HOW).blocks, nullptr, (HOW).stream>>>(__VA_ARGS__)
#endif
