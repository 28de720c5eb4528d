"""Tokens to the ranks that hold their experts, and the results back: the exchange of expert parallelism.

The ranks of a group hold ``num_experts / ranks`` neighbouring experts each, and tokens of their own. A token travels
once to every rank that holds some of its experts, however many it has there, and what comes back is their weighted sum.
With 4 experts on 2 ranks, top-2, tokens a, b on rank 0 and c, d on rank 1 (a·2: token a for expert 2)::

                              rank 0 (experts 0, 1)         rank 1 (experts 2, 3)
    routes                    a→0 a→2  b→0 b→1              c→0 c→3  d→2 d→3
    rows to rank 0 | 1        a b | a                       c | c d
    rows received             a b c                         a c d
    computed, by expert       a·0 b·0 c·0 b·1               a·2 d·2 c·3 d·3
    weighted, summed by row   a·0  b·0 + b·1  c·0           a·2  c·3  d·2 + d·3
    sent back, summed         a·0 + a·2    b·0 + b·1        c·0 + c·3    d·2 + d·3

There is no capacity and no padding, and nothing is dropped. When ``top_k`` choices fall on ranks at random, a token
leaves its rank (ranks - 1) (1 - (1 - 1/ranks)^top_k) times, and as many sums come back: with top-8 on 4 ranks 2.7
times, where an exchange of (token, expert) pairs would send it 6 times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_llm.parallel.exchange import Exchange, Journey, even_exchange


@dataclass(frozen=True)
class Route:
    """Which rows one forward pass exchanges, and which experts the received ones are for."""

    num_tokens: int
    """Tokens of this rank."""
    token: torch.Tensor
    """[sent rows] the token that each row is a copy of; rows for the first rank of the group come first."""
    there: Exchange
    """Of these rows."""
    index: torch.Tensor
    """[received rows, top_k] the experts that each row has chosen, counted from this rank's first; their number in
    place of those that are not here."""
    num_pairs: int
    """Choices of the received rows that are here: (row, expert) pairs to compute."""


@torch.no_grad()
def plan_route(top_k_index: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Route:
    """Agree with the other ranks of ``group`` on what is exchanged. Collective; waits for the device once.

    ``top_k_index`` [tokens, top_k] counts experts over the whole group. A choice that a token skips, which models write
    as ``num_experts``, is sent nowhere and counts as zero.
    """
    ranks, local = group.size(), num_experts // group.size()
    owner = (top_k_index // local).clamp(max=ranks)  # `ranks`: skipped
    goes = owner.new_zeros(len(owner), ranks + 1, dtype=torch.bool).scatter_(1, owner, True)[:, :ranks]
    chosen = torch.bincount(owner.flatten(), minlength=ranks + 1)[:ranks]
    sent = torch.stack([goes.sum(0), chosen], dim=1)  # [rank, (rows, pairs)]
    received = even_exchange(ranks, group)(sent)
    (send_sizes, _), (receive_sizes, pairs) = torch.stack([sent.T, received.T]).tolist()

    row = torch.argsort(goes.T.flatten(), stable=True, descending=True)[: sum(send_sizes)]  # by rank, then by token
    rank, token = row // max(len(owner), 1), row % max(len(owner), 1)
    index = torch.where(owner[token] == rank[:, None], top_k_index[token] % local, local)
    there = Exchange(group, send_sizes, receive_sizes)
    return Route(len(owner), token, there, there(index), sum(pairs))


@dataclass(frozen=True)
class Arrivals:
    """Rows on their way to the ranks that hold their experts."""

    route: Route
    hidden_states: Journey
    weights: Journey

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows [received rows, hidden] that this rank's experts see, and their weights [received rows, top_k]."""
        return self.hidden_states.arrive(), self.weights.arrive()


@dataclass(frozen=True)
class Returns:
    """Results on their way back to the ranks that sent the rows."""

    route: Route
    results: Journey

    def wait(self) -> torch.Tensor:
        """The sum of what comes back for each token: [tokens, hidden]."""
        return sum_rows(self.results.arrive(), self.route.token, self.route.num_tokens)


def dispatch(hidden_states: torch.Tensor, top_k_weights: torch.Tensor, route: Route) -> Arrivals:
    """Start to send hidden states [tokens, hidden] and the weights of their choices [tokens, top_k] along ``route``.

    Collective, as everything here, and so is its backward.
    """
    return Arrivals(route, route.there.start(hidden_states[route.token]), route.there.start(top_k_weights[route.token]))


def combine(results: torch.Tensor, route: Route) -> Returns:
    """Start to bring the weighted sum for each received row [received rows, hidden] back."""
    return Returns(route, route.there.back.start(results))


def sum_rows(rows: torch.Tensor, target: torch.Tensor, size: int) -> torch.Tensor:
    """[size, hidden]: row i of ``rows`` added to row ``target[i]``, in float32 or better, then rounded."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(size, rows.shape[-1], dtype=dtype, device=rows.device).index_add(0, target, rows.to(dtype))
    return sums.to(rows.dtype)
