#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dispatch.h"

#if defined(MINDSPEED_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mindspeed::cpu {
namespace {

#ifdef MINDSPEED_X86
// Linux gives a process the tile registers only on request.
bool has_amx_tiles() {
#if defined(MINDSPEED_EMULATE_AMX)
  return true;
#elif defined(__linux__)
  if (!(__builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16"))) return false;
  constexpr int kArchRequestXcompPermission = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchRequestXcompPermission, kXfeatureTileData) == 0;
#else
  return false;
#endif
}

// __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
Capability detect() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")))
    return Capability::kDefault;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return Capability::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Capability::kAvx512;
  return has_amx_tiles() ? Capability::kAmx : Capability::kAvx512Bf16;
}
#else
Capability detect() { return Capability::kDefault; }
#endif

Capability lowered_by_environment(Capability detected) {
  const char* value = std::getenv("MINDSPEED_CPU_CAPABILITY");
  if (value == nullptr || *value == '\0') return detected;
  for (int level = 0; level < kCapabilities; ++level)
    if (std::string_view(value) == kCapabilityNames[level])
      return level < static_cast<int>(detected) ? static_cast<Capability>(level) : detected;
  std::string message = "MINDSPEED_CPU_CAPABILITY=" + std::string(value) + " is not one of";
  for (const char* name : kCapabilityNames) message += std::string(" ") + name;
  throw std::invalid_argument(message);
}

}  // namespace

Capability detected_capability() {
  static const Capability detected = detect();
  return detected;
}

Capability cpu_capability() {
  static const Capability capability = lowered_by_environment(detected_capability());
  return capability;
}

}  // namespace mindspeed::cpu
