"""Tokens to the ranks that hold their experts, and the results back: the exchange of expert parallelism.

The ranks of a group hold ``num_experts / ranks`` neighbouring experts each, and tokens of their own. With 4 experts on
2 ranks, top-2, and two tokens a, b on rank 0 and two tokens c, d on rank 1::

                        rank 0 (experts 0, 1)          rank 1 (experts 2, 3)
    routes              a→0 a→2 b→1 b→0                c→3 c→0 d→2 d→3
    sorted by expert    a0 b0 b1 | a2                  c0 | d2 c3 d3
    exchanged           a0 b0 b1 | c0                  a2 | d2 c3 d3
    computed, back      a0 b0 b1 | a2                  c0 | d2 c3 d3
    weighted, summed    a b                            c d

Only rows that an expert computes are sent, each once: no capacity, no padding, nothing dropped. The routing weights
never leave their rank, and so need no exchange of their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Route:
    """Where the rows of one forward pass go. A *row* is one (token, expert) pair."""

    order: torch.Tensor
    """[sent rows] positions in the flattened ``top_k_index``, sorted by expert: the order of sending."""
    send_sizes: list[int]
    """Rows for each rank of the group."""
    receive_sizes: list[int]
    """Rows from each rank of the group."""
    expert: torch.Tensor
    """[received rows] the expert of each row, counted from this rank's first."""


@torch.no_grad()
def plan_route(top_k_index: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Route:
    """Agree with the other ranks of ``group`` on who sends how much. Collective; waits for the device.

    ``top_k_index`` [tokens, top_k] counts experts over the whole group. A choice that a token skips, which models write
    as ``num_experts``, is sent nowhere and counts as zero.
    """
    ranks = group.size()
    expert = top_k_index.reshape(-1)
    order = torch.argsort(expert, stable=True)
    sent = torch.bincount(expert, minlength=num_experts)[:num_experts].view(ranks, -1)  # [rank, its experts]
    received = torch.empty_like(sent)  # [rank that sends, own experts]
    dist.all_to_all_single(received, sent, group=group)
    send_sizes, receive_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    own = torch.arange(num_experts // ranks, device=expert.device).repeat(ranks)
    own = own.repeat_interleave(received.flatten(), output_size=sum(receive_sizes))
    return Route(order[: sum(send_sizes)], send_sizes, receive_sizes, own)


def dispatch(hidden_states: torch.Tensor, top_k: int, route: Route, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``hidden_states`` [tokens, hidden] along ``route``; returns the rows [received rows, hidden] for this rank's
    experts, of which ``route.expert`` tells the expert. Collective, and so is its backward."""
    rows = hidden_states[route.order // top_k]
    return _Exchange.apply(rows, route.send_sizes, route.receive_sizes, group)


def combine(rows: torch.Tensor, top_k_weights: torch.Tensor, route: Route, group: dist.ProcessGroup) -> torch.Tensor:
    """Send results ``rows`` [received rows, hidden] back to where ``dispatch`` had them from, and add them up per token
    with ``top_k_weights`` [tokens, top_k]. Returns [tokens, hidden]. Collective, and so is its backward."""
    returned = _Exchange.apply(rows, route.receive_sizes, route.send_sizes, group)
    by_token = rows.new_zeros(top_k_weights.numel(), rows.shape[-1]).index_copy(0, route.order, returned)
    by_token = by_token.view(*top_k_weights.shape, rows.shape[-1])  # [tokens, top_k, hidden]
    return (by_token * top_k_weights.unsqueeze(-1)).sum(1)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows. The gradients go the opposite way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way_back = receive_sizes, send_sizes, group
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(gradient, *ctx.way_back), None, None, None
