"""Muon: against torch's own, which parameters it takes, and the same step on any number of ranks."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.optim.muon import Muon, hidden_matrices
from mindspeed_llm.optim.optimizer import OptimizerFactory
from tests.distributed import launch
from tests.llm.optim.muon_worker import LAYOUTS, take_steps
from tests.llm.parallel.cases import MODELS, build_model

WORKER = str(Path(__file__).with_name("muon_worker.py"))


def with_gradients(model: torch.nn.Module, *, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_equal_those_of_torch() -> None:
    """Three steps, clipped; only the momentum of Newton–Schulz in bfloat16 rounds in another order."""
    torch.manual_seed(0)
    start = torch.randn(12, 20)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = Muon([{"params": [ours], "orthogonal": True}], lr=0.1, weight_decay=0.2)
    expected = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(12, 20)
        theirs.grad = 0.3 * ours.grad
        optimizer.step(gradient_scale=0.3)
        expected.step()
    torch.testing.assert_close(
        optimizer.state[ours]["momentum_buffer"], expected.state[theirs]["momentum_buffer"], rtol=1e-6, atol=1e-7
    )
    assert (ours - theirs).norm() < 0.03 * (theirs - start).norm()


def test_takes_the_matrices_of_the_layers() -> None:
    model = build_model("deepseek_v3")
    chosen = {name for name, parameter in model.named_parameters() if parameter in hidden_matrices(model)}
    assert "model.layers.1.mlp.experts.gate_up_proj" in chosen
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in chosen
    assert "model.layers.0.mlp.gate_proj.weight" in chosen
    assert all("proj" in name for name in chosen), chosen
    groups = OptimizerFactory(TrainingConfig(output_dir="unused", optimizer="muon")).create(model).param_groups
    listed = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
    assert [group.get("orthogonal", False) for group in groups] == [True, False, False]


@pytest.mark.parametrize("name", MODELS)
def test_leaves_embeddings_head_and_routers_to_adamw(name: str) -> None:
    model = build_model(name)
    chosen = {n for n, parameter in model.named_parameters() if parameter in hidden_matrices(model)}
    assert any("q_" in n for n in chosen)
    assert not any(part in n for n in chosen for part in ("embed", "lm_head", "norm", "mlp.gate.", "router", "bias"))


def test_embeddings_by_other_names() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))
    chosen = {n for n, parameter in model.named_parameters() if parameter in hidden_matrices(model)}
    assert {n.split(".h.")[1][2:] for n in chosen} == {
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"
    }  # fmt: skip


def test_no_gradient_at_all_stays_finite() -> None:
    """An expert without tokens has a gradient of zeros."""
    model = build_model("qwen3_moe")
    optimizer = OptimizerFactory(TrainingConfig(output_dir="unused", optimizer="muon")).create(model)
    with_gradients(model)
    model.model.layers[0].mlp.experts.gate_up_proj.grad[1] = 0
    model.model.layers[0].self_attn.q_proj.weight.grad = None
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert len(optimizer.state[model.model.layers[0].self_attn.q_proj.weight]) == 0


def test_the_same_steps_however_matrices_are_sharded(tmp_path: Path) -> None:
    """A shard orthogonalized by itself would not be the shard of the orthogonalized matrix."""
    with start() as distributed:
        expected = take_steps({}, distributed)
    finished = launch([WORKER, str(tmp_path / "results.pt")], 4)
    assert finished.returncode == 0, finished.stderr
    for layout, actual in zip(LAYOUTS, torch.load(tmp_path / "results.pt"), strict=True):
        for name, parameter in expected.items():
            torch.testing.assert_close(actual[name], parameter, rtol=1e-6, atol=1e-6, msg=f"{layout}: {name}")
