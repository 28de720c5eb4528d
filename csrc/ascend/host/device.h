// What the operators' host code shares: checks, tensors as kernels see them, and torch_npu's stream and queue.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <functional>

#include "launch/launch.h"

namespace mindspeed::ascend {

using at::Tensor;
using std::optional;

// How many blocks of this device a kernel is launched on.
int32_t vector_cores();
int32_t cube_cores();

// Runs `start` when torch_npu's queue comes to it. The stream's earlier work is done before the kernel starts. `start`
// has to own the tensors that it uses.
void enqueue(const char* name, std::function<void(void* stream)> start);

Type type_of(const Tensor&);

// Nothing for a tensor that is absent.
Memory input(const char* name, const Tensor&);
Memory output(const char* name, const Tensor&);
Memory in_out(const char* name, const Tensor&);
Memory workspace(const Tensor&);

// A kernel's memory between its cores.
Tensor make_workspace(const Tensor& like, int64_t bytes);

// [rows, columns] of a tensor, contiguous.
Tensor as_matrix(const Tensor&);

// Undefined if absent.
inline Tensor or_none(const optional<Tensor>& tensor) { return tensor ? *tensor : Tensor(); }

}  // namespace mindspeed::ascend
