"""Gradient norm and clipping."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_llm.optim.clip import clip_gradients
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


def test_below_the_limit_and_without_a_limit_nothing_changes(process_group):
    gradient = torch.tensor([3.0, 4.0])
    for limit in (5.0, 0.0):
        (parameter,) = with_gradients(gradient)
        assert clip_gradients([parameter], limit) == 5.0
        assert torch.equal(parameter.grad, gradient)


def test_long_gradients_are_measured_to_rounding(process_group):
    gradient = torch.rand(3_000_001)
    (parameter,) = with_gradients(gradient)
    assert clip_gradients([parameter], 0.0) == pytest.approx(gradient.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_reported_and_scales_nothing(process_group, poison):
    first, second = with_gradients(torch.ones(2), torch.tensor([poison]))
    assert not math.isfinite(clip_gradients([first, second], 1.0))
    assert torch.equal(first.grad, torch.ones(2))


def test_no_gradients_at_all(process_group):
    assert clip_gradients([torch.nn.Parameter(torch.zeros(2))], 1.0) == 0.0


def test_one_norm_over_mixed_meshes_on_four_ranks():
    finished = launch([str(Path(__file__).with_name("clip_worker.py"))], 4)
    assert finished.returncode == 0, finished.stderr
