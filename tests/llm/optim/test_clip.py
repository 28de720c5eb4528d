"""Gradient norm and clipping."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_llm.optim.clip import clip_coefficient, clip_gradients_as_torch, gradient_norm
from tests.distributed import launch


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_gradients(*gradients: torch.Tensor) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@pytest.mark.parametrize(
    ("norm", "limit", "coefficient"),
    [(5.0, 5.0, 1.0), (5.0, 0.0, 1.0), (0.0, 1.0, 1.0), (5.0, 2.0, 0.4), (math.nan, 1.0, 1.0), (math.inf, 1.0, 1.0)],
)
def test_only_a_finite_norm_above_a_limit_is_clipped(norm, limit, coefficient):
    assert clip_coefficient(norm, limit) == coefficient


def test_long_gradients_are_measured_to_rounding(process_group):
    gradient = torch.rand(3_000_001)
    assert gradient_norm(with_gradients(gradient)) == pytest.approx(gradient.double().norm().item(), rel=1e-6)


def test_torch_s_own_norm_is_less_exact(process_group):
    """With which LLaMA-Factory clips: 3 million elements, added up in float32 one after the other in each lane."""
    parameters = with_gradients(torch.rand(3_000_001))
    exact = parameters[0].grad.double().norm().item()
    theirs = clip_gradients_as_torch(parameters, max_norm=0.0)
    ours = gradient_norm(parameters)
    assert abs(ours / exact - 1) < 1e-7 < 1e-6 < abs(theirs / exact - 1) < 1e-3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_reported(process_group, poison):
    assert not math.isfinite(gradient_norm(with_gradients(torch.ones(2), torch.tensor([poison]))))


def test_no_gradients_at_all(process_group):
    assert gradient_norm([torch.nn.Parameter(torch.zeros(2))]) == 0.0


def test_one_norm_over_mixed_meshes_on_four_ranks():
    """Peers' report E4: the same float on every rank."""
    finished = launch([str(Path(__file__).with_name("clip_worker.py"))], 4)
    assert finished.returncode == 0, finished.stderr
