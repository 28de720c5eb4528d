"""Attention to keys and values that travel round a ring of ranks.

Ring Attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889), with chunks that balance causal work: see
:class:`~mindspeed_llm.parallel.context.layout.SequenceLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from mindspeed_kernels.ops.flash_attention import backward as flash_backward
from mindspeed_kernels.ops.flash_attention import forward as flash_forward
from mindspeed_llm.parallel.context.layout import Block, SequenceLayout


@dataclass(frozen=True)
class Scores:
    """What turns queries and keys into the logits of the softmax; arguments of ``flash_attention``."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: SequenceLayout,
    scores: Scores,
    group: dist.ProcessGroup,
) -> Tensor:
    """Causal attention within documents, of this rank's queries to the keys of all ranks of ``group``. Collective.

    Args:
        q: ``[batch, 2 * chunk, num_heads, head_dim]``, the two chunks of every row that this rank holds.
        k: ``[batch, 2 * chunk, num_kv_heads, head_dim]``; travels as it is, not expanded to the heads of ``q``.
        v: ``[batch, 2 * chunk, num_kv_heads, value_dim]``.
        sinks: ``[num_heads]``, one more logit in each softmax, or None.

    Returns ``[batch, 2 * chunk, num_heads, value_dim]``. Differentiable once, in q, k, v and sinks.
    """
    chunks = (x.unflatten(1, (2, -1)).transpose(0, 1).flatten(1, 2) for x in (q, k, v))  # [2, batch * chunk, ...]
    out = _RingAttention.apply(*chunks, sinks, layout, scores, group)
    return out.unflatten(1, (q.shape[0], -1)).transpose(0, 1).flatten(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    places: list[int],
    bounds: list[Tensor],
    scale: float | None,
    window: int | None,
    softcap: float | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The forward pass: output and logsumexp. ``places`` and ``bounds`` are what ``_flatten`` makes of the blocks."""
    ring, shapes = _Ring(_resolve_process_group(GroupName(group))), (k.shape, v.shape)
    scores, steps = Scores(scale, window, softcap), _unflatten(places, bounds, ring.size)
    buffer = _pack(k, v)
    merged: dict[int, _Merged] = {}
    for step, blocks in enumerate(steps):
        arriving = ring.pass_on(buffer) if step + 1 < ring.size else None
        keys, values = _unpack(buffer, *shapes)
        for i, j, block in blocks:
            found = flash_forward(q[i], keys[j], values[j], **vars(scores), **vars(block))
            if i in merged:
                merged[i].add(*found)
            else:
                merged[i] = _Merged(*found)
        if arriving is not None:
            buffer = arriving.wait()
    if sinks is not None:
        for part in merged.values():
            part.add_sinks(sinks)
    return torch.stack([merged[i].out.to(q.dtype) for i in (0, 1)]), torch.stack([merged[i].logsumexp for i in (0, 1)])


_attend = torch.library.custom_op("mindspeed_llm::ring_attention", attend, mutates_args=())
"""As one operator, whose results selective recomputation keeps."""


class _RingAttention(torch.autograd.Function):
    """Forward merges the outputs of blocks by their logsumexp; backward needs only what was merged of all blocks.

    While a rank attends to one rank's keys and values, those of the next are on their way. In backward the gradients of
    keys and values follow them one step behind, added up in float32, and take a last hop home.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: SequenceLayout,
        scores: Scores,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ring = _Ring(group)
        steps = [list(_blocks(layout, scores.window, ring.rank, ring.source(step))) for step in range(ring.size)]
        out, logsumexp = _attend(q, k, v, sinks, *_flatten(steps), *vars(scores).values(), group.group_name)
        ctx.save_for_backward(q, k, v, sinks, out, logsumexp)
        ctx.steps, ctx.scores, ctx.group = steps, scores, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logsumexp = ctx.saved_tensors
        ring, shapes = _Ring(ctx.group), (k.shape, v.shape)
        grad_q = torch.zeros_like(q, dtype=logsumexp.dtype)
        buffer, gradients = _pack(k, v), None
        for step, blocks in enumerate(ctx.steps):
            arriving = ring.pass_on(buffer) if step + 1 < ring.size else None
            keys, values = _unpack(buffer, *shapes)
            share = torch.zeros_like(buffer, dtype=logsumexp.dtype)  # of this rank in the gradients of keys and values
            grad_k, grad_v = _unpack(share, *shapes)
            for i, j, block in blocks:
                dq, dk, dv, _ = flash_backward(
                    grad_out[i], None, q[i], keys[j], values[j], out[i], logsumexp[i], **vars(ctx.scores), **vars(block)
                )
                grad_q[i] += dq
                grad_k[j] += dk
                grad_v[j] += dv
            if gradients is not None:
                share += gradients.wait()
            gradients = ring.pass_on(share)
            if arriving is not None:
                buffer = arriving.wait()
        assert gradients is not None  # of the last step: those of this rank's own keys and values
        grad_k, grad_v = _unpack(gradients.wait(), *shapes)
        grad_sinks = None if sinks is None else _gradient_of_sinks(sinks, grad_out, out, logsumexp)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None, None


@dataclass
class _Merged:
    """The output ``[tokens, num_heads, value_dim]`` and logsumexp ``[num_heads, tokens]`` of several blocks as one.

    The first block is the one on the diagonal, where every query sees itself: the logsumexp is finite throughout.
    """

    out: Tensor
    logsumexp: Tensor

    def __post_init__(self) -> None:
        self.out = self.out.to(self.logsumexp.dtype)

    def add(self, out: Tensor, logsumexp: Tensor) -> None:
        """One more block; queries that see nothing of it have 0 and -inf and stay as they are."""
        share = torch.sigmoid(logsumexp - self.logsumexp).t().unsqueeze(-1)
        self.out = self.out.lerp(out.to(self.out.dtype), share)
        self.logsumexp = torch.logaddexp(self.logsumexp, logsumexp)

    def add_sinks(self, sinks: Tensor) -> None:
        """A block of one key per head whose logit is given and whose value is 0."""
        sinks = sinks.to(self.logsumexp.dtype)[:, None]
        self.out = self.out * torch.sigmoid(self.logsumexp - sinks).t().unsqueeze(-1)
        self.logsumexp = torch.logaddexp(self.logsumexp, sinks)


def _gradient_of_sinks(sinks: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> Tensor:
    """A sink has the probability exp(sink - logsumexp) and the value 0: dL/dsink = -Σ p · (dL/dout · out)."""
    product = (grad_out.to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(-1).transpose(1, 2)  # as logsumexp
    probability = torch.exp(sinks.to(logsumexp.dtype)[:, None] - logsumexp)  # [2, num_heads, tokens]
    return -(probability * product).sum((0, 2)).to(sinks.dtype)


_Blocks = list[tuple[int, int, Block]]


def _blocks(layout: SequenceLayout, window: int | None, rank: int, source: int) -> Iterator[tuple[int, int, Block]]:
    """Which of a rank's two query chunks see which of the two key chunks of ``source``, the diagonal first."""
    for i, query_chunk in enumerate(layout.chunks_of(rank)):
        for j, key_chunk in reversed(list(enumerate(layout.chunks_of(source)))):
            block = layout.block(query_chunk, key_chunk, window)
            if block is not None:
                yield i, j, block


def _flatten(steps: list[_Blocks]) -> tuple[list[int], list[Tensor]]:
    """The blocks of every step as an operator takes them: step and chunks, and three tensors, of each block."""
    blocks = [(step, *block) for step, blocks in enumerate(steps) for block in blocks]
    places = [index for step, i, j, _ in blocks for index in (step, i, j)]
    return places, [bound for *_, block in blocks for bound in vars(block).values()]


def _unflatten(places: list[int], bounds: list[Tensor], num_steps: int) -> list[_Blocks]:
    steps: list[_Blocks] = [[] for _ in range(num_steps)]
    for index in range(0, len(places), 3):
        step, i, j = places[index : index + 3]
        steps[step].append((i, j, Block(*bounds[index : index + 3])))
    return steps


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Both in one buffer, to travel in one message."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpack(buffer: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    k, v = buffer.split([k_shape.numel(), v_shape.numel()])
    return k.view(k_shape), v.view(v_shape)


class _Ring:
    """Ranks of a group, each of which sends to the next and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def source(self, step: int) -> int:
        """Whose keys and values are here after so many hops."""
        return (self.rank - step) % self.size

    def pass_on(self, buffer: Tensor) -> _Arrival:
        """Start sending ``buffer`` and receiving one like it; it must not change until the arrival is waited for."""
        received = torch.empty_like(buffer)
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, group=self.group, group_peer=following),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous),
            ]
        )
        return _Arrival(received, buffer, works)


@dataclass(frozen=True)
class _Arrival:
    """A buffer on its way here, and the one that left for it."""

    received: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
