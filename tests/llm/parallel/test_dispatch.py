"""The exchange of expert parallelism: values and gradients are those of one process that has all tokens and experts."""

from pathlib import Path

import pytest
import torch

from tests.distributed import launch
from tests.llm.parallel.dispatch_worker import run_cases
from tests.llm.parallel.toy_mixture import CASES, HIDDEN, NUM_EXPERTS, TOP_K, experts_forward, make_weights, rank_inputs

WORKER = str(Path(__file__).with_name("dispatch_worker.py"))


def reference(case: str, ranks: int) -> list[dict]:
    stacked = make_weights().requires_grad_()
    results = []
    for rank in range(ranks):
        hidden, index, weights = rank_inputs(case, rank, ranks)
        hidden.requires_grad_()
        weights.requires_grad_()
        kept = index < NUM_EXPERTS
        rows = experts_forward(hidden.repeat_interleave(TOP_K, 0), index.flatten() * kept.flatten(), stacked)
        output = (rows.view(*index.shape, HIDDEN) * (weights * kept)[..., None]).sum(1)
        (output.sin() * torch.arange(output.shape[-1])).sum().backward()
        # A token goes to a rank once, however many of its experts are there.
        owners = [set(owners) - {rank, ranks} for owners in (index // (NUM_EXPERTS // ranks)).tolist()]
        sent = sum(len(others) for others in owners)
        results.append({"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, "sent": sent})
    for result, own in zip(results, stacked.grad.chunk(ranks), strict=True):
        result["experts"] = own
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_process(ranks, tmp_path):
    """Uneven splits, ranks without tokens and ranks whose experts get none included (peers' reports E5, E29)."""
    if ranks == 1:
        actual = run_cases()
    else:
        finished = launch([WORKER, str(tmp_path / "results.pt")], ranks)
        assert finished.returncode == 0, finished.stderr
        actual = torch.load(tmp_path / "results.pt")
    for case in CASES:
        torch.testing.assert_close(actual[case], reference(case, ranks), rtol=1e-12, atol=1e-12)
