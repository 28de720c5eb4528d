"""Queries, keys and values of the context-parallel attention test."""

from __future__ import annotations

import torch

from mindspeed_llm.data.collate import Batch


def packed_batch(case: dict) -> Batch:
    """Rows of documents of the lengths ``case["rows"]``."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in case["rows"]])
    return Batch(input_ids=positions, labels=positions, position_ids=positions)


def inputs(case: dict) -> dict[str, torch.Tensor]:
    """q, k, v and the output's gradient ``[batch, seq, heads, dim]``, sinks ``[heads]`` where the case has them."""
    generator = torch.Generator().manual_seed(5)
    shape = (len(case["rows"]), sum(case["rows"][0]))
    dtype = getattr(torch, case["dtype"])

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    heads, kv_heads, dim, value_dim = case["heads"], case["kv_heads"], 8, 6
    made = {
        "q": normal(*shape, heads, dim),
        "k": normal(*shape, kv_heads, dim),
        "v": normal(*shape, kv_heads, value_dim),
        "grad": normal(*shape, heads, value_dim),
    }
    return made | ({"sinks": normal(heads)} if case["sinks"] else {})
