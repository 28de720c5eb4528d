// How the host starts the kernels. Each function is defined in the .asc file of its kernel: CANN's compiler, bisheng,
// makes of it a launch on a stream, and any C++ compiler one on the CPU twin.
#pragma once

#include <cstdint>

#include "kernels/flash_attention_tiling.h"
#include "kernels/grouped_gemm_tiling.h"
#include "kernels/moe_tiling.h"
#include "kernels/rms_norm_tiling.h"
#include "kernels/rotary_tiling.h"
#include "kernels/swiglu_tiling.h"

namespace mindspeed::ascend {

// What a kernel does to a tensor; the twin holds it to that.
enum class Use {
  kInput,      // read only
  kOutput,     // holds garbage at first; every byte has to be written
  kInOut,      // holds values at first
  kWorkspace,  // holds garbage at first
};

// A tensor's bytes in the device's memory, from the first element to the last; none if it is absent.
struct Memory {
  const char* name;
  void* data;
  int64_t bytes;
  Use use;

  operator uint8_t*() const { return static_cast<uint8_t*>(data); }  // what a kernel is given
};

enum class Type { kFloat, kBfloat16, kHalf };

constexpr int64_t bytes_of(Type type) { return type == Type::kFloat ? 4 : 2; }

// On how many blocks (vector cores, cube cores, or cube cores with two vector cores each), in which order.
struct Launch {
  int32_t blocks;
  void* stream;
};

void launch_rms_norm(const Launch&, Type x_type, Type y_type, const Memory& x, const Memory& residual,
                     const Memory& weight, const Memory& y, const Memory& sum, const Memory& rstd,
                     const RmsNormTiling&);
void launch_rms_norm_backward(const Launch&, Type x_type, Type y_type, const Memory& grad_y, const Memory& grad_sum,
                              const Memory& x, const Memory& weight, const Memory& rstd, const Memory& grad_x,
                              const Memory& grad_weight, const Memory& workspace, const RmsNormTiling&);

void launch_swiglu(const Launch&, Type, const Memory& gate, const Memory& up, const Memory& y, const SwigluTiling&);
void launch_swiglu_backward(const Launch&, Type, const Memory& grad_y, const Memory& gate, const Memory& up,
                            const Memory& grad_gate, const Memory& grad_up, const SwigluTiling&);

void launch_rotary(const Launch&, Type in, Type angle, Type out, const Memory& q, const Memory& k, const Memory& cos,
                   const Memory& sin, const Memory& q_out, const Memory& k_out, const RotaryTiling&);

void launch_moe_permute(const Launch&, Type, const Memory& x, const Memory& source, const Memory& y, const MoeTiling&);
void launch_moe_unpermute(const Launch&, Type, const Memory& y, const Memory& position, const Memory& weights,
                          const Memory& out, const MoeTiling&);
void launch_moe_unpermute_backward(const Launch&, Type, const Memory& grad_out, const Memory& y, const Memory& source,
                                   const Memory& weights, const Memory& grad_y, const Memory& grad_weights,
                                   const MoeTiling&);

void launch_grouped_gemm(const Launch&, Type, const Memory& x, const Memory& weight, const Memory& offsets,
                         const Memory& y, const GroupedGemmTiling&);
void launch_grouped_gemm_weight_gradient(const Launch&, Type, const Memory& grad_y, const Memory& x,
                                         const Memory& offsets, const Memory& grad_weight, const GroupedGemmTiling&);

void launch_flash_attention(const Launch&, Type, const Memory& q, const Memory& k, const Memory& v,
                            const Memory& blocks, const Memory& sinks, const Memory& out, const Memory& logsumexp,
                            const Memory& workspace, const AttentionTiling&);

struct AttentionGradientMemory {
  Memory q, k, v, grad_out, logsumexp, delta, blocks, workspace;
};

// Of query blocks and of key blocks.
void launch_flash_attention_query_gradient(const Launch&, Type, const AttentionGradientMemory&, const Memory& grad_q,
                                           const AttentionTiling&);
void launch_flash_attention_key_gradient(const Launch&, Type, const AttentionGradientMemory&, const Memory& grad_k,
                                         const Memory& grad_v, const AttentionTiling&);

}  // namespace mindspeed::ascend
