"""Sequence to heads and back: every rank of a group attends with a part of the heads to all tokens.

DeepSpeed-Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.parallel.exchange import even_exchange


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of ``x [ranks, ...]`` goes to rank i, and part i of the result comes from there. Its own transpose."""
    return even_exchange(len(x), group)(x)


def gather(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """``x`` of every rank, ``[ranks, ...]``, those of the last group outermost. Gradients come home and add up."""
    shape = x.shape
    for group in groups:
        x = exchange(x.expand(group.size(), *x.shape), group)
    return x.reshape(-1, *shape)


def to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """From some tokens of all heads to all tokens of some heads, in one exchange.

    ``tensors`` are ``[batch, seq, heads, dim]`` with the ranks' tokens one after the other; heads and dim may differ
    from tensor to tensor, heads must be a multiple of the group's size. Returns
    ``[batch, ranks * seq, heads / ranks, dim]`` of each.
    """
    ranks = group.size()
    # [batch, seq, ranks, heads / ranks * dim]: what each rank is to get of a token, from all tensors
    parts = [t.unflatten(2, (ranks, -1)).flatten(3) for t in tensors]
    received = exchange(torch.cat(parts, dim=3).permute(2, 0, 1, 3), group)  # [ranks, batch, seq, features]
    tokens = received.transpose(0, 1).flatten(1, 2)
    split = tokens.split([part.shape[3] for part in parts], dim=2)
    return [part.unflatten(2, (-1, t.shape[3])) for part, t in zip(split, tensors, strict=True)]


def to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo :func:`to_heads`: from ``[batch, ranks * seq, heads / ranks, dim]`` to ``[batch, seq, heads, dim]``."""
    ranks = group.size()
    received = exchange(x.unflatten(1, (ranks, -1)).transpose(0, 1), group)  # [ranks, batch, seq, heads, dim]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def repeat_for_ranks(x: Tensor, ranks: int) -> Tensor:
    """Repeat the key or value heads of ``x [batch, seq, heads, dim]`` as little as makes them divisible by ``ranks``.

    A head's copies are neighbours, so that they still belong to its query heads.
    """
    copies = ranks // math.gcd(x.shape[2], ranks)
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)
