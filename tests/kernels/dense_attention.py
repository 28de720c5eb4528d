"""Attention over all scores at once, in float64: what the operator is held against, and how far it may be off.

Nothing here is shared with the operator or its reference: keys and values are repeated for their queries' heads, and a
packed batch is one matrix of scores under a mask that is written down pair by pair, as the documentation words it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.kernels.compare import FLOAT32_EPS, assert_close


def visible(seq_q: int, seq_k: int, offset: int, causal: bool, window: int | None) -> Tensor:
    """``[seq_q, seq_k]``: which keys each query of one sequence sees."""

    def sees(i: int, j: int) -> bool:
        p = i + offset
        if causal and j > p:
            return False
        return window is None or (p - window < j and (causal or j < p + window))

    return torch.tensor([[sees(i, j) for j in range(seq_k)] for i in range(seq_q)], dtype=torch.bool).view(seq_q, seq_k)


def visible_batch(q: Tensor, k: Tensor, options: dict) -> Tensor:
    """``[batch, seq_q, seq_k]``, or ``[1, tokens_q, tokens_k]`` of a packed batch."""
    causal, window, offsets = (
        options.get(name, default) for name, default in (("causal", True), ("window", None), ("query_offsets", None))
    )
    if "cu_seqlens_q" not in options:
        given = [k.shape[1] - q.shape[1]] * q.shape[0] if offsets is None else offsets.tolist()
        masks = [visible(q.shape[1], k.shape[1], offset, causal, window) for offset in given]
        return torch.stack(masks) if masks else torch.zeros(0, q.shape[1], k.shape[1], dtype=torch.bool)
    mask = torch.zeros(1, len(q), len(k), dtype=torch.bool)
    ends_q, ends_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    for n, (q0, q1, k0, k1) in enumerate(zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)):
        offset = (k1 - k0) - (q1 - q0) if offsets is None else offsets[n].item()
        mask[0, q0:q1, k0:k1] = visible(q1 - q0, k1 - k0, offset, causal, window)
    return mask


def in_a_sequence(q: Tensor, options: dict) -> Tensor:
    """``[seq_q]``: 1, or 0 for packed queries that belong to no sequence."""
    index = torch.arange(q.shape[-3])
    if "cu_seqlens_q" not in options:
        return torch.ones_like(index)
    return ((options["cu_seqlens_q"][0] <= index) & (index < options["cu_seqlens_q"][-1])).long()


@dataclass(frozen=True)
class Sum:
    """A result, and for each of its elements the size of what was added up to it."""

    value: Tensor
    terms: Tensor
    """Σ |probability · ...|: a half-precision kernel may round the probabilities and their gradients."""
    scale: Tensor
    """The same, with each probability multiplied by the size of the terms of its logit, whose rounding moves it."""

    def check(self, actual: Tensor, name: str) -> None:
        assert_close(actual, self.value, name, scale=self.scale, terms=self.terms)


@dataclass(frozen=True)
class Dense:
    """The results of one call in float64."""

    out: Sum
    logsumexp: Tensor
    logsumexp_scale: Tensor
    grads: dict[str, Sum]
    """Of q, k, v and, if there are any, sinks."""

    def check(self, out: Tensor, logsumexp: Tensor, grads: Sequence[Tensor]) -> None:
        self.out.check(out, "out")
        assert logsumexp.dtype == torch.float32
        blind = self.logsumexp == -torch.inf
        assert torch.equal(logsumexp == -torch.inf, blind)
        assert_close(
            logsumexp.masked_fill(blind, 0),
            self.logsumexp.masked_fill(blind, 0),
            "logsumexp",
            scale=self.logsumexp_scale,
        )
        for (name, expected), grad in zip(self.grads.items(), grads, strict=True):
            expected.check(grad, f"grad_{name}")


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grad_out: Tensor, grad_logsumexp: Tensor | None, **options
) -> Dense:
    """The same arguments as the operator's, and the gradients of its outputs."""
    mask = visible_batch(q, k, options)[:, None]  # [batch, 1, seq_q, seq_k]
    packed = "cu_seqlens_q" in options
    scale, softcap = options.get("scale"), options.get("softcap")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v) + (() if sinks is None else (sinks,))]

    def heads(t: Tensor) -> Tensor:
        """``[batch, num_heads, seq, dim]``."""
        t = (t[None] if packed else t).transpose(1, 2)
        return t.repeat_interleave(q.shape[-2] // t.shape[1], 1)

    def logits_of(q: Tensor, k: Tensor) -> Tensor:
        scores = scale * heads(q) @ heads(k).mT
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    logits = logits_of(*leaves[:2])
    terms = torch.where(mask, torch.exp(logits), 0.0)
    total = terms.sum(-1)
    if sinks is not None:
        sink_terms = torch.exp(leaves[3])[:, None] * in_a_sequence(q, options)  # [num_heads, seq_q]
        total = total + sink_terms
    p = terms / torch.where(total > 0, total, 1.0)[..., None]
    logsumexp = torch.log(torch.where(total > 0, total, 1.0))
    out = p @ heads(leaves[2])

    def unheads(t: Tensor) -> Tensor:
        return t.transpose(1, 2)[0] if packed else t.transpose(1, 2)

    def rows(t: Tensor) -> Tensor:
        return t[0] if packed else t

    grad_lse = torch.zeros_like(rows(logsumexp)) if grad_logsumexp is None else grad_logsumexp.double()
    grads = torch.autograd.grad(
        (unheads(out), rows(logsumexp)), leaves, (grad_out.double(), grad_lse), allow_unused=True
    )
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]

    blind = rows(total == 0)
    p_sink = None if sinks is None else (sink_terms / torch.where(total > 0, total, 1.0)).detach()
    with torch.no_grad():
        size_q, size_k, size_v, size_grad = (heads(t.abs()) for t in (*leaves[:3], grad_out.double()))
        spread = 1 + scale * size_q @ size_k.mT
        delta = (size_grad * out.abs()).sum(-1) + (grad_lse[None] if packed else grad_lse).abs()

        def over_group(t: Tensor) -> Tensor:
            return t.unflatten(1, (k.shape[-2], -1)).sum(2)

        def sizes(p: Tensor, p_sink: Tensor | None) -> tuple[Tensor, ...]:
            grad_scores = scale * p * (size_grad @ size_v.mT + delta[..., None])
            of_out, of_q = unheads(p @ size_v), unheads(grad_scores @ size_k)
            of_k, of_v = unheads(over_group(grad_scores.mT @ size_q)), unheads(over_group(p.mT @ size_grad))
            return of_out, of_q, of_k, of_v, *(() if p_sink is None else ((p_sink * delta).sum((0, 2)),))

        largest = spread.amax(-1) if k.numel() else torch.ones_like(total)
        terms, scales = sizes(p, p_sink), sizes(p * spread, None if p_sink is None else p_sink * largest)
        sums = [Sum(value.detach(), *size) for value, *size in zip((unheads(out), *grads), terms, scales, strict=True)]
    if sinks is not None:
        # Its dtype need not be q's, in which the backward finds `out`, rounded.
        rounding = torch.finfo(q.dtype).eps / 2 * sums[-1].terms / (16 * FLOAT32_EPS)
        sums[-1] = replace(sums[-1], scale=sums[-1].scale + rounding)
    names = ("q", "k", "v", "sinks")[: len(grads)]
    return Dense(
        sums[0],
        rows(logsumexp).detach().masked_fill(blind, -torch.inf),
        rows(logsumexp.abs() + largest),
        dict(zip(names, sums[1:], strict=True)),
    )
