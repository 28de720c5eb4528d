// The same instructions, once as csrc/cpu/common/amx.h writes them and once by the compiler's intrinsics.
#define MINDSPEED_ISA amx
#include "csrc/cpu/common/amx.h"

using namespace mindspeed::cpu::amx;

extern "C" void ours(const TileConfiguration* configuration, void* rows, int64_t stride) {
  tile_load_configuration(*configuration);
  tile_zero<3>();
  tile_load<4>(rows, stride);
  tile_multiply_add<1, 4, 7>();
  tile_store<2>(rows, stride);
  tile_release();
}

extern "C" void intrinsics(const TileConfiguration* configuration, void* rows, int64_t stride) {
  _tile_loadconfig(configuration);
  _tile_zero(3);
  _tile_loadd(4, rows, stride);
  _tile_dpbf16ps(1, 4, 7);
  _tile_stored(2, rows, stride);
  _tile_release();
}
