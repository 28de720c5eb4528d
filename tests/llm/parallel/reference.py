"""Training in one process, in plain PyTorch and transformers, and the comparison of other layouts with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from mindspeed_llm.data.collate import Batch
from tests.distributed import launch
from tests.llm.parallel.cases import ADAMW, build_model, rows

WORKER = str(Path(__file__).with_name("worker.py"))


def case(model: str, ranks: int, *, accumulation: int = 1, packed: bool = False, aux: float = 0.0, **parallel) -> dict:
    return {
        "model": model, "ranks": ranks, "accumulation": accumulation, "packed": packed, "aux": aux, "parallel": parallel
    }  # fmt: skip


def check(cases: list[dict], ranks: int, folder: Path, timeout: float = 120) -> None:
    """Train every case on ``ranks`` ranks, and compare it with the reference."""
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = launch([WORKER, str(folder / "cases.json"), str(folder / "results.pt")], ranks, timeout=timeout)
    assert finished.returncode == 0, finished.stderr
    for case, actual in zip(cases, torch.load(folder / "results.pt"), strict=True):
        expected = reference(case)
        torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-6, atol=0, msg=f"{case}: losses")
        torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-5, atol=0, msg=f"{case}: norms")
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for kind, limit in (("gradients", 1e-5), ("parameters", 1e-5)):
            for name, value in expected[kind].items():
                error = (actual[kind][name] - value).norm() / value.norm().clamp_min(1e-12)
                assert error <= limit, f"{case}: {kind} of {name} are off by {error:.1e}"


def reference(case: dict) -> dict:
    """The same steps in one process, written in plain PyTorch and transformers, a row at a time."""
    model = build_model(case["model"])
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    result: dict = {"losses": [], "norms": []}
    for step in rows(case):
        targets = sum(int((row["labels"] >= 0).sum()) for row in step)
        tokens = sum(row.num_tokens for row in step)
        loss, aux_loss = torch.zeros(()), torch.zeros(())
        options = {"output_router_logits": True} if case["aux"] else {}
        for row in step:
            outputs = []
            for part in documents(row, case):
                output = model(**{k: v for k, v in part.items() if k != "labels"}, use_cache=False, **options)
                valid = part["labels"] >= 0
                logits, labels = output.logits[valid], part["labels"][valid]
                loss = loss + F.cross_entropy(logits, labels, reduction="sum") / max(targets, 1)
                outputs.append(output)
            if case["aux"]:
                aux_loss = aux_loss + balancing_loss(model, outputs) * row.num_tokens / tokens
        (loss + case["aux"] * aux_loss).backward()
        result["losses"].append((loss.item(), aux_loss.item()))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        result.setdefault("gradients", gradients)
        norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
        result["norms"].append(norm)
        for parameter in model.parameters():
            if parameter.grad is not None and norm > 1:
                parameter.grad /= norm
        optimizer.step()
        optimizer.zero_grad()
    result["parameters"] = dict(model.named_parameters())
    return result


def documents(row: Batch, case: dict) -> list[Batch]:
    """What the reference computes by itself: the documents of a packed row, where context parallelism divides it.

    The strongest reference (E9), as some models of transformers (gpt_oss, qwen3_next) let packed documents see each
    other. What lies behind them is left out (faults L7).
    """
    if not case["packed"]:
        return [row]
    starts = [0]
    if case["parallel"].get("cp_size", 1) > 1:
        starts = (row["position_ids"][0, : row.num_tokens] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], row.num_tokens]
    return [Batch({name: x[:, a:b] for name, x in row.items()}) for a, b in zip(starts, ends, strict=True)]


def balancing_loss(model: PreTrainedModel, outputs: list) -> torch.Tensor:
    """transformers' own of a row; of several documents, of their tokens together."""
    if len(outputs) == 1:
        return outputs[0].aux_loss
    logits = tuple(torch.cat(layers) for layers in zip(*(output.router_logits for output in outputs), strict=True))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return function(logits, model.num_experts, model.num_experts_per_tok)
