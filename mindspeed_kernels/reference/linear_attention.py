"""What linear attention is made of: a convolution, the gated delta rule, a gated norm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kernels.reference._common import widened

GateActivation = Literal["silu", "sigmoid"]


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float = 1e-6, activation: GateActivation = "silu"
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight * activation(gate)``; see :func:`mindspeed_kernels.rms_norm_gated`."""
    _check(
        "rms_norm_gated",
        x.shape == gate.shape and x.dtype == gate.dtype,
        lambda: f"gate must be like x, {list(x.shape)} of {x.dtype}, but is {list(gate.shape)} of {gate.dtype}",
    )
    _check(
        "rms_norm_gated",
        weight.shape == x.shape[-1:],
        lambda: f"weight must have shape {list(x.shape[-1:])}, the last dimension of x, but has {list(weight.shape)}",
    )
    wide = widened(x)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    factor = F.silu(widened(gate)) if activation == "silu" else torch.sigmoid(widened(gate))
    return (normalized * widened(weight) * factor).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = "silu",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The convolution of each sequence with itself alone; see :func:`mindspeed_kernels.causal_conv1d`."""
    _check("causal_conv1d", x.dim() == 3, lambda: f"x must be [batch, seq, channels], but is {list(x.shape)}")
    _check(
        "causal_conv1d",
        weight.dim() == 2 and weight.shape[0] == x.shape[2] and weight.shape[1] >= 1,
        lambda: f"weight must be [channels, width] with the channels of x {list(x.shape)}, but is {list(weight.shape)}",
    )
    _check(
        "causal_conv1d",
        bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype),
        lambda: f"bias must have shape {list(weight.shape[:1])} of {weight.dtype}, as weight, but is {_describe(bias)}",
    )
    tokens = widened(x).flatten(0, 1)
    filters = widened(weight).unbind(1)
    pieces = []
    for sequence in split_sequences("causal_conv1d", tokens, x.shape[0], cu_seqlens):
        padded = F.pad(sequence, (0, 0, len(filters) - 1, 0))  # [width - 1 + length, channels]
        y = sum((padded[w : w + len(sequence)] * f for w, f in enumerate(filters)), start=sequence.new_zeros(()))
        y = y if bias is None else y + widened(bias)
        pieces.append(F.silu(y) if activation == "silu" else y)
    return join_sequences(pieces, tokens, cu_seqlens).view(x.shape).to(x.dtype)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Token by token, the state of each head; see :func:`mindspeed_kernels.gated_delta_rule`."""
    _check_gated_delta_rule(q, k, v, g, beta)
    batch, heads, value_dim = q.shape[0], v.shape[2], v.shape[3]
    dtype = widened(v).dtype
    wide = [widened(t).to(dtype).flatten(0, 1) for t in (q, k, v, g, beta)]
    if qk_l2norm:
        wide[:2] = [t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in wide[:2]]
    wide[:2] = [t.repeat_interleave(heads // max(1, q.shape[2]), 1) for t in wide[:2]]
    sequences = [split_sequences("gated_delta_rule", t, batch, cu_seqlens) for t in wide]
    state_shape = (len(sequences[0]), heads, q.shape[3], value_dim)
    _check(
        "gated_delta_rule",
        initial_state is None or initial_state.shape == state_shape,
        lambda: f"initial_state must be [sequences, value_heads, key_dim, value_dim] = {list(state_shape)}",
    )
    initial = wide[2].new_zeros(state_shape) if initial_state is None else widened(initial_state).to(dtype)
    outs, states = [], []
    for state, *sequence in zip(initial, *sequences, strict=True):
        reads = [state.new_zeros(0, heads, value_dim)]
        for q_, k_, v_, g_, beta_ in zip(*sequence, strict=True):  # [heads, dim] or [heads]
            state = g_.exp().view(heads, g_.shape[-1] if g_.dim() == 2 else 1, 1) * state
            error = v_ - torch.einsum("hkv,hk->hv", state, k_)
            state = state + torch.einsum("hk,hv->hkv", k_, beta_[:, None] * error)
            reads.append(torch.einsum("hkv,hk->hv", state, q_)[None])
        outs.append(torch.cat(reads))
        states.append(state)
    if scale is None:
        scale = q.shape[3] ** -0.5 if q.shape[3] else 1.0
    out = (scale * join_sequences(outs, wide[2], cu_seqlens)).view(v.shape).to(v.dtype)
    return (out, torch.stack(states) if states else initial) if return_final_state else out


def _check_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    _check(
        "gated_delta_rule",
        q.dim() == v.dim() == 4
        and q.shape == k.shape
        and q.shape[:2] == v.shape[:2]
        and (v.shape[2] == 0 if q.shape[2] == 0 else v.shape[2] % q.shape[2] == 0),
        lambda: (
            "q and k [batch, seq, key_heads, key_dim] and v [batch, seq, value_heads, value_dim], value_heads a "
            f"multiple of key_heads, do not fit together: q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        ),
    )
    _check(
        "gated_delta_rule",
        q.dtype == k.dtype == v.dtype,
        lambda: f"q, k and v must have one dtype, but have {q.dtype}, {k.dtype} and {v.dtype}",
    )
    _check(
        "gated_delta_rule",
        g.shape in (v.shape[:3], (*v.shape[:3], q.shape[3])),
        lambda: (
            "g must be [batch, seq, value_heads] or [batch, seq, value_heads, key_dim], for each head of v "
            f"{list(v.shape)} a number or one for each channel of q {list(q.shape)}, but is {list(g.shape)}"
        ),
    )
    _check(
        "gated_delta_rule",
        beta.shape == v.shape[:3],
        lambda: (
            f"beta must be [batch, seq, value_heads], a number for each head of v {list(v.shape)}, but is "
            f"{list(beta.shape)}"
        ),
    )


def split_sequences(op: str, tokens: Tensor, batch: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The sequences of ``[batch * seq, ...]``: the rows of the batch, or the runs between the boundaries."""
    if cu_seqlens is None:
        return list(tokens.unflatten(0, (batch, -1) if batch else (0, 0)))
    _check(
        op,
        cu_seqlens.dim() == 1 and cu_seqlens.numel() > 0 and cu_seqlens.dtype in (torch.int32, torch.int64),
        lambda: f"cu_seqlens must be one dimension of int32 or int64, but is {list(cu_seqlens.shape)}",
    )
    ends = cu_seqlens.tolist()
    _check(
        op,
        ends[0] >= 0 and ends[-1] <= len(tokens) and all(a <= b for a, b in itertools.pairwise(ends)),
        lambda: f"cu_seqlens must ascend within the {len(tokens)} tokens, but is {ends}",
    )
    return [tokens[a:b] for a, b in itertools.pairwise(ends)]


def join_sequences(pieces: list[Tensor], tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Undo :func:`split_sequences`, with zeros for tokens outside of all sequences."""
    if not pieces:
        return tokens * 0
    joined = torch.cat(pieces)
    if cu_seqlens is None:
        return joined
    around = [int(cu_seqlens[0]), len(tokens) - int(cu_seqlens[-1])]
    return F.pad(joined, [0, 0] * (joined.dim() - 1) + around)


def _describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"


def _check(op: str, condition: bool, message: Callable[[], str]) -> None:
    torch._check(condition, lambda: f"{op}: {message()}")
