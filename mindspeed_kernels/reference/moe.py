"""Mixture of experts: sorting tokens by expert, products with one weight for each expert."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.reference._common import widened


def moe_permute(x: Tensor, expert_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens copied to the experts' rows; see :func:`mindspeed_kernels.moe_permute`."""
    expert = expert_index.flatten()
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)  # the skipped ones last
    expert, order = torch.sort(expert, stable=True)
    all_experts = torch.arange(num_experts, device=expert.device, dtype=expert.dtype)
    offsets = torch.searchsorted(expert, all_experts, right=True)
    source = torch.where(expert < num_experts, order, -1)
    return rows_of_tokens(x, source, expert_index.shape[1]), offsets.to(torch.int32), source


def rows_of_tokens(x: Tensor, source: Tensor, top_k: int) -> Tensor:
    """The token of each assignment in ``source``, zeros for -1."""
    rows = x[source.clamp(min=0) // top_k]
    return torch.where((source >= 0).unsqueeze(-1), rows, rows.new_zeros(()))


def moe_unpermute(y_sorted: Tensor, source: Tensor, weights: Tensor | None = None, *, top_k: int) -> Tensor:
    """The weighted sum of each token's rows; see :func:`mindspeed_kernels.moe_unpermute`."""
    assignment = source.clamp(min=0)
    rows = torch.where((source >= 0).unsqueeze(-1), widened(y_sorted), 0.0)
    if weights is not None:
        rows = rows * widened(weights).flatten()[assignment].unsqueeze(-1)
    tokens = rows.new_zeros(y_sorted.shape[0] // top_k, y_sorted.shape[1])
    return tokens.index_add(0, assignment // top_k, rows).to(y_sorted.dtype)


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
    """Each group's rows times its weight; see :func:`mindspeed_kernels.grouped_gemm`."""
    torch._check(
        x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1 if transposed else 2],
        lambda: (
            f"grouped_gemm: x {list(x.shape)} must be [rows, k] and weight {list(weight.shape)} must be "
            f"[groups, {'k, n' if transposed else 'n, k'}]"
        ),
    )
    return _grouped_linear(x, weight, offsets, transposed).to(x.dtype)


def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """The products before they are rounded."""
    wide_x, wide_weight = widened(x), widened(weight if transposed else weight.transpose(1, 2))
    ends = offsets.tolist()
    parts = [wide_x[begin:end] @ wide_weight[g] for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]
    rest = wide_x.new_zeros(x.shape[0] - (ends[-1] if ends else 0), wide_weight.shape[2])
    return torch.cat((*parts, rest))


def fused_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = torch.inf,
    up_offset: float = 0.0,
) -> Tensor:
    """Each token through its experts; see :func:`mindspeed_kernels.fused_experts`.

    A row's weight is applied to the activation: it is linear from there on. Products are rounded to x's dtype.
    """
    num_experts, top_k = gate_up.shape[0], top_k_index.shape[1]
    rows, offsets, source = moe_permute(x, top_k_index, num_experts)
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    expert = torch.arange(num_experts, device=x.device).repeat_interleave(counts)  # [rows], without those left over
    rows, used = rows[: len(expert)], source[: len(expert)]
    weight = widened(top_k_weights).flatten()[used].unsqueeze(-1)

    z = _grouped_linear(rows, gate_up, offsets, transposed)
    if gate_up_bias is not None:
        z = z + widened(gate_up_bias)[expert]
    z = widened(z.to(x.dtype))
    gate, up = (z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = weight * gate * torch.sigmoid(alpha * gate) * (up + up_offset)

    y = _grouped_linear(h.to(x.dtype), down, offsets, transposed)
    if down_bias is not None:
        y = y + weight * widened(down_bias)[expert]
    out = y.new_zeros(x.shape).index_add(0, used // top_k, widened(y.to(x.dtype)))
    return out.to(x.dtype)
