"""What torch_npu's fused operators compute, written from op-plugin's documentation, for the CPU.

They stand in for kernels that need an NPU, and refuse what the documentation excludes. They cannot show that the
documentation is right. Parameters are named as in the schemas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COPIES = 8


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == input.dtype
    rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    y, rstd = rms_norm(total, gamma, epsilon)
    return y, rstd, total


def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    assert rstd.shape == (*input.shape[:-1], 1)
    normalized, scaled = input.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    return dx.to(input.dtype), (dy.float() * normalized).flatten(0, -2).sum(0)


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    sigmoid = torch.sigmoid(gate)
    d_gate = grad_output * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((d_gate, grad_output * gate * sigmoid), dim).to(input.dtype)


def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """BNSD or BSND, told apart by where the angles are broadcast over the heads."""
    batch, _, _, dim = input.shape
    assert input.dtype == r1.dtype == r2.dtype
    assert dim % 2 == 0
    assert dim < 896
    assert r1.shape[0] in ((1,) if rotary_mode == "interleave" else (1, batch))
    assert r1.shape[1:] in ((1, input.shape[2], dim), (input.shape[1], 1, dim))
    if rotary_mode == "interleave":
        partner = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    else:
        assert rotary_mode == "half"
        first, second = input.chunk(2, -1)
        partner = torch.cat((-second, first), -1)
    return (r1.float() * input.float() + r2.float() * partner.float()).to(input.dtype)


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int = 0,
    group_list_type: int = 0,
) -> list[Tensor]:
    (x,), (weight,) = x, weight
    ends = group_list.tolist()
    assert (split_item, group_list_type, group_list.dtype) == (3, 0, torch.int64)
    assert x.dtype == weight.dtype
    groups = list(itertools.pairwise([0, *ends]))
    assert all(begin <= end for begin, end in groups)
    if group_type == 0:
        assert ends[-1] == len(x)
        assert len(weight) == len(ends)
        y = [x[begin:end].float() @ w.float() for (begin, end), w in zip(groups, weight, strict=True)]
        return [torch.cat(y).to(x.dtype)]
    assert group_type == 2
    assert ends[-1] == x.shape[1] == weight.shape[0]
    sums = [x[:, begin:end].float() @ weight[begin:end].float() for begin, end in groups]
    # That empty groups are written is documented nowhere.
    nothing = torch.full_like(sums[0], torch.nan)
    return [
        torch.stack([s if end > begin else nothing for s, (begin, end) in zip(sums, groups, strict=True)]).to(x.dtype)
    ]


def token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    order = torch.sort(indices.flatten(), stable=True).indices
    assert num_out_tokens == indices.numel()
    assert bool((indices >= 0).all())
    return tokens[order // indices.shape[1]], torch.sort(order).indices.int()


def token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    assert sorted_indices.dtype == torch.int32
    assert probs is not None  # without, every token has one row
    assert probs.dtype == permuted_tokens.dtype
    rows = permuted_tokens.float()[sorted_indices.long()].unflatten(0, probs.shape)
    return (rows * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


def token_unpermute_grad(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor,
    *,
    permuted_tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    position = sorted_indices.long()
    grads = (grad_unpermuted_tokens.float().unsqueeze(1) * probs.float().unsqueeze(-1)).flatten(0, 1)
    grad_rows = grads.new_zeros(permuted_tokens_size_0, grad_unpermuted_tokens.shape[1]).index_copy(0, position, grads)
    products = permuted_tokens.float()[position].unflatten(0, probs.shape) * grad_unpermuted_tokens.float().unsqueeze(1)
    return grad_rows.to(permuted_tokens_dtype), products.sum(-1).to(probs.dtype)


def gating_top_k_softmax(x: Tensor, finished: None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    y, index = x.float().softmax(-1).topk(k)
    return y.to(x.dtype), index.int(), torch.arange(index.numel()).view(k, -1).T.int()


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    sink: Tensor | None = None,
    softmax_layout: str = "",
    **mask: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    outs, maxima, totals = [], [], []
    for (q, k, v), hidden in _sequences(input_layout, softmax_layout, mask, query, key, value):
        scores = scale * torch.einsum("qhd,khd->hqk", q, _repeat(k, head_num)).masked_fill(hidden, -torch.inf)
        if sink is not None:
            assert sink.dtype == torch.float32
            scores = torch.cat((scores, sink.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
        maximum = scores.amax(-1, keepdim=True)
        terms = torch.exp(scores - maximum)
        total = terms.sum(-1, keepdim=True)
        outs.append(torch.einsum("hqk,khd->qhd", (terms / total)[..., : len(k)], _repeat(v, head_num)))
        maxima.append(maximum), totals.append(total)  # [num_heads, queries, 1]
    out, *statistics = (_join(input_layout, parts) for parts in (outs, maxima, totals))
    return out.to(query.dtype), *(s.expand(*s.shape[:-1], COPIES).contiguous() for s in statistics), out[:0], 0, 0, 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    sink: Tensor | None = None,
    softmax_layout: str = "",
    **mask: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    grads: list[list[Tensor]] = [[], [], []]
    grad_sink = torch.zeros(head_num)
    heads_first = input_layout == "BSND"
    statistics = [s[..., :1].movedim(1, 2) if heads_first else s[..., :1] for s in (softmax_max, softmax_sum)]
    tensors = (query, key, value, dy, attention_in, *statistics)
    for (q, k, v, grad, out, maximum, total), hidden in _sequences(input_layout, softmax_layout, mask, *tensors):
        maximum, total = maximum.movedim(0, 1), total.movedim(0, 1)  # [num_heads, queries, 1]
        keys, values = _repeat(k, head_num), _repeat(v, head_num)
        scores = scale_value * torch.einsum("qhd,khd->hqk", q, keys).masked_fill(hidden, -torch.inf)
        p = torch.exp(scores - maximum) / total
        delta = (grad * out).sum(-1).T.unsqueeze(-1)
        grad_scores = scale_value * p * (torch.einsum("qhd,khd->hqk", grad, values) - delta)
        grads[0].append(torch.einsum("hqk,khd->qhd", grad_scores, keys))
        grads[1].append(torch.einsum("hqk,qhd->khd", grad_scores, q).unflatten(1, (k.shape[1], -1)).sum(2))
        grads[2].append(torch.einsum("hqk,qhd->khd", p, grad).unflatten(1, (k.shape[1], -1)).sum(2))
        if sink is not None:
            grad_sink -= (torch.exp(sink.view(-1, 1, 1) - maximum) / total * delta).sum((1, 2))
    dq, dk, dv = (_join(input_layout, parts, sequences_first=True).to(query.dtype) for parts in grads)
    return dq, dk, dv, None, grad_sink if sink is not None else grad_sink[:0]


def _repeat(heads: Tensor, count: int) -> Tensor:
    return heads.repeat_interleave(count // heads.shape[1], 1)


def _sequences(
    layout: str, softmax_layout: str, mask: dict[str, Any], *tensors: Tensor
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Each sequence's part of the tensors, ``[length, heads, ...]`` in float32, and which scores are hidden."""
    query, key = tensors[:2]
    if layout == "BSND":
        ends = [list(range(0, (len(t) + 1) * t.shape[1], t.shape[1])) for t in (query, key)]
        tensors = tuple(t.flatten(0, 1) for t in tensors)
    else:
        assert (layout, softmax_layout) == ("TND", "TND")
        ends = [[0, *mask[name]] for name in ("actual_seq_qlen", "actual_seq_kvlen")]
        assert [e[-1] for e in ends] == [len(query), len(key)]
    for queries, keys in zip(*(itertools.starmap(slice, itertools.pairwise(e)) for e in ends), strict=True):
        if queries.start == queries.stop and keys.start == keys.stop:
            continue  # an empty sequence may be among others
        parts = [t[keys if index in (1, 2) else queries].float() for index, t in enumerate(tensors)]
        yield parts, _hidden(len(parts[0]), len(parts[1]), **mask)


def _hidden(
    queries: int,
    keys: int,
    *,
    sparse_mode: int = 0,
    atten_mask: Tensor | None = None,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    **_: Any,
) -> Tensor:
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)  # from the lower right corner
    if sparse_mode == 0:
        assert atten_mask is None
        return torch.zeros(queries, keys, dtype=torch.bool)
    assert sparse_mode in (3, 4)
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert queries <= keys
    return distance < 0 if sparse_mode == 3 else (distance > pre_tockens) | (distance < -next_tockens)


def _join(layout: str, parts: list[Tensor], *, sequences_first: bool = False) -> Tensor:
    """Of all sequences: stacked, or packed. Statistics come as ``[num_heads, queries, 1]``."""
    if layout == "BSND":
        return torch.stack(parts)
    statistics = not sequences_first and parts[0].shape[-1] == 1
    return torch.cat([part.movedim(0, 1) if statistics else part for part in parts])


MODELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_rotary_mul": rotary_mul,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_token_permute": token_permute,
    "npu_moe_token_unpermute": token_unpermute,
    "npu_moe_token_unpermute_grad_v2": token_unpermute_grad,
    "npu_moe_gating_top_k_softmax": gating_top_k_softmax,
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_grad": fusion_attention_grad,
}
