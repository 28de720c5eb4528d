"""Attention across ranks equals attention in one process: outputs and gradients of q, k, v and sinks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.distributed import launch
from tests.llm.parallel.context.attention_cases import inputs, packed_batch

WORKER = str(Path(__file__).with_name("attention_worker.py"))


def case(ring: int, ulysses: int, **changes) -> dict:
    """21 tokens: no number of ranks divides them (faults X2)."""
    plain = {
        "ring": ring, "ulysses": ulysses, "rows": [[21]], "heads": 4, "kv_heads": 4, "window": None, "softcap": None,
        "sinks": False, "dtype": "float32",
    }  # fmt: skip
    return plain | changes


def variants(ring: int, ulysses: int) -> list[dict]:
    packed = [[3, 11, 7], [1, 1, 19]]  # documents across the chunks' ends, and of one token (faults X5)
    return [
        case(ring, ulysses),
        case(ring, ulysses, rows=packed, kv_heads=2, window=5),
        case(ring, ulysses, rows=packed, kv_heads=1, sinks=True),  # E21: fewer heads of keys than ranks
        case(ring, ulysses, rows=[[21], [21]], softcap=3.0, kv_heads=2, sinks=True, window=9),
        case(ring, ulysses, rows=[[3]], window=2),  # rows shorter than the number of ranks
        case(ring, ulysses, rows=packed, kv_heads=2, dtype="bfloat16"),
    ]


CASES = {
    4: [case for sizes in ((2, 1), (1, 2), (4, 1), (1, 4), (2, 2)) for case in variants(*sizes)],
    3: [case(1, 3, heads=6, kv_heads=2, sinks=True), *variants(3, 1)],
}


def attention(q, k, v, mask, case, sinks=None):
    """From the definition, with all scores in memory."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if case["softcap"]:
        scores = case["softcap"] * torch.tanh(scores / case["softcap"])
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    probabilities = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v)


def expected(case: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Computed in ``dtype``."""
    position_ids = packed_batch(case)["position_ids"]
    index = torch.arange(position_ids.shape[1])
    document = (position_ids == 0).cumsum(1)
    distance = index[:, None] - index
    mask = (document[:, :, None] == document[:, None]) & (distance >= 0) & (distance < (case["window"] or 10**6))
    tensors = {name: x.to(dtype).requires_grad_() for name, x in inputs(case).items()}
    grad = tensors.pop("grad").detach()
    out = attention(*(tensors[name] for name in "qkv"), mask, case, tensors.get("sinks"))
    out.backward(grad)
    return {"out": out.detach()} | {name: x.grad for name, x in tensors.items()}


def bytes_sent(case: dict) -> int:
    """By a rank in forward and backward: heads to the others of Ulysses, keys and values as they are round the ring."""
    ring, ulysses, size = case["ring"], case["ulysses"], 2 if case["dtype"] == "bfloat16" else 4
    tokens = sum(map(sum, case["rows"])) + len(case["rows"]) * (-sum(case["rows"][0]) % (2 * ring * ulysses))
    heads, kv_heads = case["heads"], math.lcm(case["kv_heads"], ulysses)  # repeated only where there are too few
    per_token = heads * 8 + kv_heads * (8 + 6) + heads * 6  # q, k and v there, the output back
    exchanged = 2 * tokens // (ring * ulysses) * per_token * size * (ulysses - 1) // ulysses
    passed_on = tokens // ring * kv_heads // ulysses * (8 + 6)  # elements of one hop
    # Once more in backward, where their float32 gradients follow and take a hop more to come home.
    return exchanged + passed_on * (2 * (ring - 1) * size + ring * 4 * (ring > 1))


@pytest.mark.parametrize("ranks", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_one_process(ranks, tmp_path):
    cases = CASES[ranks]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    finished = launch([WORKER, str(tmp_path / "cases.json"), str(tmp_path / "results.pt")], ranks)
    assert finished.returncode == 0, finished.stderr
    for case, actual in zip(cases, torch.load(tmp_path / "results.pt"), strict=True):
        exact = expected(case, torch.float64)
        # bfloat16: roundings of the inputs' size in every block and where ranks' shares are added up
        limit = 2e-6 if case["dtype"] == "float32" else 2**-6
        assert int(actual.pop("bytes sent")) == bytes_sent(case)
        assert actual.keys() == exact.keys()
        for name, value in exact.items():
            error = (actual[name] - value).norm() / value.norm()
            assert error <= limit, f"{case}: {name} is off by {error:.1e}"
