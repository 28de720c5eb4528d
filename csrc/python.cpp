// The Python module mindspeed_kernels._C. Importing it registers the operators; its functions report what was chosen,
// and its submodule `data` orders samples.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cpu/adamw.h"
#include "cpu/bfloat16_sum.h"
#include "cpu/causal_conv1d.h"
#include "cpu/chunk_sum.h"
#include "cpu/cross_entropy.h"
#include "cpu/flash_attention.h"
#include "cpu/fused_experts.h"
#include "cpu/gated_delta_rule.h"
#include "cpu/grouped_gemm.h"
#include "cpu/moe_permute.h"
#include "cpu/rms_norm.h"
#include "cpu/rms_norm_gated.h"
#include "cpu/rotary.h"
#include "cpu/swiglu.h"
#include "data/python.h"

namespace {

using namespace mindspeed::cpu;

std::string name(Capability capability) { return kCapabilityNames[static_cast<int>(capability)]; }

template <class... Table>
std::map<std::string, std::string> chosen(const Table&... tables) {
  return {{tables.name, name(tables.chosen())}...};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  mindspeed::data::bind(m);
  m.def("detected_cpu_capability", [] { return name(detected_capability()); });
  m.def("cpu_capability", [] { return name(cpu_capability()); });
  m.def("cpu_kernels", [] {
    return chosen(adamw_step_kernel, bfloat16_sum_kernel, causal_conv1d_backward_kernel, causal_conv1d_forward_kernel,
                  chunk_sum_kernel, cross_entropy_kernel, flash_attention_backward_kernel, flash_attention_delta_kernel,
                  flash_attention_forward_kernel, fused_experts_backward_kernel, fused_experts_bias_gradient_kernel,
                  fused_experts_forward_kernel, gated_delta_rule_backward_kernel, gated_delta_rule_forward_kernel,
                  grouped_gemm_kernel, grouped_outer_product_kernel, moe_permute_kernel, moe_unpermute_backward_kernel,
                  moe_unpermute_kernel, rms_norm_backward_kernel, rms_norm_forward_kernel,
                  rms_norm_gated_backward_kernel, rms_norm_gated_forward_kernel, rotary_kernel, swiglu_backward_kernel,
                  swiglu_forward_kernel);
  });
}
