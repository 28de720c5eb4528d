"""Inputs and experts of the dispatch test: float64, so that only a wrong route can make a difference."""

from __future__ import annotations

import torch

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 5
CASES = ["even", "one_expert", "no_tokens_on_rank_0", "nothing_for_the_last_rank", "no_tokens_at_all", "skipped"]


def make_weights() -> torch.Tensor:
    return torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rank_inputs(case: str, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's hidden states [tokens, hidden], expert numbers and routing weights [tokens, top_k]."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = 0 if case == "no_tokens_at_all" or (case == "no_tokens_on_rank_0" and rank == 0) else 4 + 3 * rank
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    last = NUM_EXPERTS - NUM_EXPERTS // ranks if case == "nothing_for_the_last_rank" and ranks > 1 else NUM_EXPERTS
    scores = torch.rand(tokens, last, generator=generator, dtype=torch.float64)
    weights, index = scores.topk(TOP_K)
    if case == "one_expert":
        index = torch.full_like(index, 2)
    if case == "skipped":
        index[::2, 1] = NUM_EXPERTS  # a token chooses fewer experts than the others
    return hidden, index, weights


def experts_forward(rows: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Row i through the matrix of expert ``expert[i]``, with something that is not linear after it."""
    return torch.einsum("rh,rho->ro", rows, weights[expert]).tanh()
