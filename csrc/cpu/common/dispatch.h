// One kernel source, compiled once per instruction set, chosen at run time.
//
// A kernel source (`*_kernel.cpp`) puts everything into `namespace mindspeed::cpu::MINDSPEED_ISA`, a name that the
// build sets for each instruction set, and everything but its entry points into an anonymous namespace inside. It uses
// no inline function of external linkage: of those the linker keeps a single copy, and if that is the one compiled for
// AVX-512, the portable path runs into an illegal instruction on an older machine. The build checks that.
#pragma once

#include <cstdint>

namespace mindspeed::cpu {

// Instruction sets in ascending order; each machine that has one has all before it.
enum class Capability {
  kDefault,     // what the compiler assumes by default: SSE2 on x86-64, NEON on aarch64
  kAvx2,        // with FMA and F16C
  kAvx512,      // F, BW, DQ, VL
  kAvx512Bf16,  // conversion and dot products of bfloat16
  kAmx,         // bfloat16 tiles
};

constexpr int kCapabilities = 5;
inline constexpr const char* kCapabilityNames[kCapabilities] = {"default", "avx2", "avx512", "avx512_bf16", "amx"};

// What this machine and its operating system can run.
Capability detected_capability();

// What kernels may use: the detected capability, or the lower one that the environment variable
// MINDSPEED_CPU_CAPABILITY names. Throws std::invalid_argument when the variable holds no capability's name.
Capability cpu_capability();

// A kernel works on the items [begin, end) of what its arguments describe.
template <class Arguments>
using Kernel = void(const Arguments& arguments, int64_t begin, int64_t end);

// The same kernel for each capability; nullptr where none is compiled for it (x86 levels on another processor), and the
// next lower one is taken. Elementwise kernels have nothing to gain from tiles: their AMX code is their AVX-512 code.
template <class Arguments>
struct KernelTable {
  const char* name;
  Kernel<Arguments>* by_capability[kCapabilities];

  Capability chosen() const {
    int level = static_cast<int>(cpu_capability());
    while (by_capability[level] == nullptr) --level;
    return static_cast<Capability>(level);
  }

  Kernel<Arguments>& operator*() const { return *by_capability[static_cast<int>(chosen())]; }
};

}  // namespace mindspeed::cpu

// MINDSPEED_KERNEL(name, Arguments) declares a kernel's entry points and the table `name`; `*name` is the one to call.
// clang-format off
#ifdef MINDSPEED_X86
#define MINDSPEED_KERNEL(name, Arguments)           \
  namespace portable { Kernel<Arguments> name; }    \
  namespace avx2 { Kernel<Arguments> name; }        \
  namespace avx512 { Kernel<Arguments> name; }      \
  namespace avx512_bf16 { Kernel<Arguments> name; } \
  namespace amx { Kernel<Arguments> name; }         \
  inline constexpr KernelTable<Arguments> name{     \
      #name, {&portable::name, &avx2::name, &avx512::name, &avx512_bf16::name, &amx::name}};
#else
#define MINDSPEED_KERNEL(name, Arguments)        \
  namespace portable { Kernel<Arguments> name; } \
  inline constexpr KernelTable<Arguments> name{#name, {&portable::name}};
#endif
// clang-format on
