#include "device.h"

#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <string_view>

namespace mindspeed::ascend {

namespace {

// The split cores that the kernels are written and compiled for (dav-2201).
constexpr std::string_view kSupported[] = {"Ascend910B", "Ascend910_93"};

void check_supported() {
  const char* name = aclrtGetSocName();
  const std::string_view soc = name == nullptr ? "" : name;
  for (const std::string_view prefix : kSupported) {
    if (soc.substr(0, prefix.size()) == prefix) return;
  }
  TORCH_CHECK(false,
              "The AscendC kernels of mindspeed_kernels are for Atlas A2 (Ascend910B*) and A3 (Ascend910_93*), "
              "but this device is ",
              soc, "; set MINDSPEED_NPU_IMPL=torch_npu or reference");
}

int32_t count(aclDeviceInfo what) {
  check_supported();
  int32_t device = 0;
  int64_t cores = 0;
  TORCH_CHECK(aclrtGetDevice(&device) == ACL_SUCCESS && aclGetDeviceCapability(device, what, &cores) == ACL_SUCCESS,
              "mindspeed: the NPU does not say how many cores it has");
  return int32_t(cores);
}

Memory memory(const char* name, const Tensor& tensor, Use use) {
  if (!tensor.defined()) return {name, nullptr, 0, use};
  int64_t extent = tensor.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < tensor.dim() && extent > 0; ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  return {name, tensor.data_ptr(), extent * int64_t(tensor.element_size()), use};
}

}  // namespace

int32_t vector_cores() {
  static const int32_t cores = count(ACL_DEVICE_INFO_VECTOR_CORE_NUM);
  return cores;
}

int32_t cube_cores() {
  static const int32_t cores = count(ACL_DEVICE_INFO_AI_CORE_NUM);
  return cores;
}

void enqueue(const char* name, std::function<void(void*)> start) {
  const auto stream = c10_npu::getCurrentNPUStream().stream(false);  // without waiting for the queue
  at_npu::native::OpCommand::RunOpApiV2(name, [stream, start = std::move(start)]() -> int {
    start(stream);
    return 0;
  });
}

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Type::kFloat;
    case at::kBFloat16:
      return Type::kBfloat16;
    case at::kHalf:
      return Type::kHalf;
    default:
      TORCH_CHECK(false, "mindspeed: AscendC kernels have no type ", tensor.scalar_type());
  }
}

Memory input(const char* name, const Tensor& tensor) { return memory(name, tensor, Use::kInput); }
Memory output(const char* name, const Tensor& tensor) { return memory(name, tensor, Use::kOutput); }
Memory in_out(const char* name, const Tensor& tensor) { return memory(name, tensor, Use::kInOut); }
Memory workspace(const Tensor& tensor) { return memory("workspace", tensor, Use::kWorkspace); }

Tensor make_workspace(const Tensor& like, int64_t bytes) { return at::empty({bytes}, like.options().dtype(at::kByte)); }

Tensor as_matrix(const Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}).contiguous(); }

}  // namespace mindspeed::ascend
