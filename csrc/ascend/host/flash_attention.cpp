#include <limits>

#include "device.h"

namespace mindspeed::ascend {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one sequence, and the key at which its first query sits.
struct Sequence {
  int64_t query, queries, key, keys, position;
};

// Packed tensors [rows, heads, dim] of whole batches or of sequences, and where those are.
struct Attention {
  Tensor q, k, v;
  std::vector<Sequence> sequences;
  int64_t batch = 0;  // 0 if packed
  bool covered;       // all rows are in sequences
  AttentionTiling tiling{};

  Attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const optional<Tensor>& cu_seqlens_q,
            const optional<Tensor>& cu_seqlens_k, const optional<Tensor>& offsets, double scale, bool causal,
            optional<int64_t> window, optional<double> softcap)
      : q(q_in), k(k_in), v(v_in), covered(true) {
    std::vector<int64_t> ends_q, ends_k;
    if (cu_seqlens_q && cu_seqlens_k) {
      ends_q = list(*cu_seqlens_q), ends_k = list(*cu_seqlens_k);
      covered = ends_q[0] == 0 && ends_q.back() == q.size(0) && ends_k[0] == 0 && ends_k.back() == k.size(0);
    } else {
      batch = q.size(0);
      for (int64_t b = 0; b <= batch; ++b) ends_q.push_back(b * q.size(1)), ends_k.push_back(b * k.size(1));
      q = q.flatten(0, 1), k = k.flatten(0, 1), v = v.flatten(0, 1);
    }
    q = q.contiguous(), k = k.contiguous(), v = v.contiguous();
    const std::vector<int64_t> given = offsets ? list(*offsets) : std::vector<int64_t>();
    for (size_t i = 0; i + 1 < ends_q.size(); ++i) {
      const int64_t queries = ends_q[i + 1] - ends_q[i], keys = ends_k[i + 1] - ends_k[i];
      sequences.push_back({ends_q[i], queries, ends_k[i], keys, offsets ? given[i] : keys - queries});
    }
    tiling.num_heads = q.size(1), tiling.num_kv_heads = k.size(1);
    tiling.head_dim = q.size(2), tiling.value_dim = v.size(2);
    tiling.queries = q.size(0);
    tiling.scale = float(scale), tiling.softcap = float(softcap.value_or(0));
    tiling.causal = causal, tiling.window = window.value_or(0);
    TORCH_CHECK(std::max(tiling.num_heads, tiling.num_kv_heads) * std::max(tiling.head_dim, tiling.value_dim) <=
                    kMaxMatrixStride,
                "flash_attention: ", tiling.num_heads, " heads of ", tiling.head_dim,
                " elements are too large for the AscendC kernel");
  }

  static std::vector<int64_t> list(const Tensor& tensor) {
    const Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
    return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
  }

  // [rows, heads, dim] like one of q, k and v as they came.
  Tensor as_given(const Tensor& packed, int64_t rows) const {
    return batch > 0 ? packed.view({batch, rows / batch, packed.size(1), packed.size(2)}) : packed;
  }

  Tensor empty(int64_t rows, int64_t heads, int64_t dim) const {
    return covered ? at::empty({rows, heads, dim}, q.options()) : at::zeros({rows, heads, dim}, q.options());
  }

  Memory result(const char* name, const Tensor& tensor) const {
    return covered ? output(name, tensor) : in_out(name, tensor);
  }

  std::vector<QueryBlock> query_blocks(int64_t size) const {
    std::vector<QueryBlock> blocks;
    for (const Sequence& s : sequences) {
      for (int64_t first = 0; first < s.queries; first += size) {
        blocks.push_back({s.query + first, smaller(size, s.queries - first), s.key, s.keys, s.position + first});
      }
    }
    return blocks;
  }

  std::vector<KeyBlock> key_blocks(int64_t size) const {
    std::vector<KeyBlock> blocks;
    for (const Sequence& s : sequences) {
      for (int64_t first = 0; first < s.keys; first += size) {
        blocks.push_back({s.key + first, smaller(size, s.keys - first), first, s.query, s.queries, s.position});
      }
    }
    return blocks;
  }

  // A table of blocks, all of int64, on the device.
  template <class Block>
  Tensor on_device(const std::vector<Block>& blocks) const {
    const int64_t columns = sizeof(Block) / sizeof(int64_t);
    const auto options = at::TensorOptions().dtype(at::kLong);
    void* data = const_cast<Block*>(blocks.data());
    return at::from_blob(data, {int64_t(blocks.size()), columns}, options).to(q.device());
  }
};

std::tuple<Tensor, Tensor> flash_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const optional<Tensor>& sinks, const optional<Tensor>& cu_seqlens_q,
                                                   const optional<Tensor>& cu_seqlens_k,
                                                   const optional<Tensor>& query_offsets, double scale, bool causal,
                                                   optional<int64_t> window, optional<double> softcap) {
  const Attention in(q, k, v, cu_seqlens_q, cu_seqlens_k, query_offsets, scale, causal, window, softcap);
  AttentionTiling tiling = in.tiling;
  tiling.rows = attention_rows(AttentionKernel::kForward, tiling, in.q.element_size());
  TORCH_CHECK(tiling.rows.per_core > 0, "flash_attention: values of ", tiling.value_dim,
              " elements are too large for the AscendC kernel");
  const Tensor wide_sinks = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  tiling.has_sinks = sinks.has_value();
  const std::vector<QueryBlock> table = in.query_blocks(tiling.per_block());
  tiling.blocks = int64_t(table.size());
  const Tensor blocks = in.on_device(table), out = in.empty(tiling.queries, tiling.num_heads, tiling.value_dim);
  const Tensor logsumexp = at::full({tiling.num_heads, tiling.queries}, -kInfinity, out.options().dtype(at::kFloat));
  const int32_t cores = cube_cores();
  const Tensor memory = make_workspace(out, cores * tiling.workspace_bytes(out.element_size()));
  if (tiling.blocks > 0) {
    enqueue("mindspeed_flash_attention", [=](void* stream) {
      launch_flash_attention({cores, stream}, type_of(out), input("q", in.q), input("k", in.k), input("v", in.v),
                             input("blocks", blocks), input("sinks", wide_sinks), in.result("out", out),
                             in_out("logsumexp", logsumexp), workspace(memory), tiling);
    });
  }
  if (in.batch == 0) return {out, logsumexp};
  const Tensor by_batch = logsumexp.view({tiling.num_heads, in.batch, -1}).transpose(0, 1).contiguous();
  return {in.as_given(out, tiling.queries), by_batch};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad_out, const optional<Tensor>& grad_logsumexp, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& logsumexp, const optional<Tensor>& sinks, const optional<Tensor>& cu_seqlens_q,
    const optional<Tensor>& cu_seqlens_k, const optional<Tensor>& query_offsets, double scale, bool causal,
    optional<int64_t> window, optional<double> softcap) {
  const Attention in(q, k, v, cu_seqlens_q, cu_seqlens_k, query_offsets, scale, causal, window, softcap);
  AttentionTiling tiling = in.tiling;
  const AttentionRows query_rows = attention_rows(AttentionKernel::kQueryGradient, tiling, in.q.element_size());
  const AttentionRows key_rows = attention_rows(AttentionKernel::kKeyGradient, tiling, in.q.element_size());
  TORCH_CHECK(key_rows.per_core > 0, "flash_attention: heads of ", tiling.head_dim, " and ", tiling.value_dim,
              " elements are too large for the AscendC kernel");
  // dL/dlogit = p · (dL/dp − Σ dL/dout · out + dL/dlogsumexp), of queries that see something.
  Tensor delta = (grad_out.to(at::kFloat) * out.to(at::kFloat)).sum(-1).transpose(-1, -2);  // as logsumexp
  const Tensor blind = logsumexp.eq(-kInfinity);
  if (grad_logsumexp) delta = delta - grad_logsumexp->masked_fill(blind, 0);
  Tensor denominator = logsumexp.masked_fill(blind, kInfinity), grad = grad_out;
  if (in.batch > 0) {  // [batch, num_heads, seq] -> [num_heads, batch * seq]
    delta = delta.transpose(0, 1).flatten(1), denominator = denominator.transpose(0, 1).flatten(1);
    grad = grad.flatten(0, 1);
  }
  delta = delta.contiguous(), denominator = denominator.contiguous(), grad = grad.contiguous();

  const int64_t keys = in.k.size(0);
  const Tensor grad_q = in.empty(tiling.queries, tiling.num_heads, tiling.head_dim);
  const Tensor grad_k = in.empty(keys, tiling.num_kv_heads, tiling.head_dim);
  const Tensor grad_v = in.empty(keys, tiling.num_kv_heads, tiling.value_dim);
  const std::vector<QueryBlock> query_table = in.query_blocks(2 * query_rows.per_core);
  const std::vector<KeyBlock> key_table = in.key_blocks(2 * key_rows.per_core);
  const Tensor query_blocks = in.on_device(query_table), key_blocks = in.on_device(key_table);
  const int32_t cores = cube_cores();
  const Tensor memory = make_workspace(grad_q, cores * tiling.gradient_workspace_bytes(grad_q.element_size()));
  const auto arguments = [=](const Tensor& blocks) -> AttentionGradientMemory {
    return {input("q", in.q),
            input("k", in.k),
            input("v", in.v),
            input("grad_out", grad),
            input("logsumexp", denominator),
            input("delta", delta),
            input("blocks", blocks),
            workspace(memory)};
  };
  if (!query_table.empty()) {
    tiling.blocks = int64_t(query_table.size()), tiling.rows = query_rows;
    enqueue("mindspeed_flash_attention_query_gradient", [=](void* stream) {
      launch_flash_attention_query_gradient({cores, stream}, type_of(grad), arguments(query_blocks),
                                            in.result("grad_q", grad_q), tiling);
    });
  }
  if (!key_table.empty()) {
    tiling.blocks = int64_t(key_table.size()), tiling.rows = key_rows;
    enqueue("mindspeed_flash_attention_key_gradient", [=](void* stream) {
      launch_flash_attention_key_gradient({cores, stream}, type_of(grad), arguments(key_blocks),
                                          in.result("grad_k", grad_k), in.result("grad_v", grad_v), tiling);
    });
  }
  Tensor grad_sinks = at::empty({0}, q.options());
  if (sinks) {
    const Tensor p = (sinks->to(at::kFloat).unsqueeze(1) - denominator).exp();  // [num_heads, queries]
    grad_sinks = (p * delta).sum(1).neg().to(sinks->scalar_type());
  }
  return {in.as_given(grad_q, tiling.queries), in.as_given(grad_k, keys), in.as_given(grad_v, keys), grad_sinks};
}

}  // namespace

TORCH_LIBRARY_IMPL(mindspeed, PrivateUse1, m) {
  m.impl("flash_attention_forward", TORCH_FN(flash_attention_forward));
  m.impl("flash_attention_backward", TORCH_FN(flash_attention_backward));
}

}  // namespace mindspeed::ascend
