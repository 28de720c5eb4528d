// Sequences packed one after the other: where each begins and ends.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sequence.h"
#include "tensor.h"

namespace mindspeed::cpu {

// The elements of a one-dimensional tensor of int32 or int64 in the host's memory.
std::vector<int64_t> integers(const char* op, const char* name, const Tensor& tensor);

// Fails unless the boundaries ascend within [0, tokens].
void check_boundaries(const char* op, const char* name, const std::vector<int64_t>& boundaries, int64_t tokens);

// Of [batch, seq, ...]: the runs between the boundaries `cu_seqlens` of the flattened batch, or each row of the batch.
std::vector<Sequence> sequences_of(const char* op, const Tensor& x, const std::optional<Tensor>& cu_seqlens);

}  // namespace mindspeed::cpu
