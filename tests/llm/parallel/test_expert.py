"""Spread experts: choices that are elsewhere, the order of exchange and computation, many architectures."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_kernels import hf
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.parallel.dispatch import Route
from mindspeed_llm.parallel.exchange import Exchange
from mindspeed_llm.parallel.expert import apply_expert_parallel, weighted_sums
from tests.distributed import launch
from tests.llm.parallel.cases import build_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # with and without a kernel
@pytest.mark.parametrize("fused", [False, True])
def test_choices_that_are_elsewhere_add_nothing(dtype, fused):
    model = build_model("gpt_oss").to(dtype)
    model.set_experts_implementation("eager")  # transformers groups no products in float64
    experts = model.model.layers[0].mlp.experts
    assert not fused or hf.apply(model, ops=["experts"]).fused("experts")
    index = torch.tensor([[0, 4], [4, 1], [2, 3], [3, 0]])  # there are four experts
    rows, weights = torch.randn(4, 32, dtype=dtype), torch.rand(4, 2, dtype=dtype)
    route = Route(4, torch.arange(4), Exchange(None, [4], [4]), index, num_pairs=6)
    expected = experts(rows, index.clamp(max=3), weights * (index < 4))
    torch.testing.assert_close(weighted_sums(experts, rows, weights, route), expected)


class _Course(TorchDispatchMode):
    """What happens to hidden states, in order: they start, they arrive, they are computed."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("mindspeed::").removeprefix("_c10d_functional::")
        if name in _EVENTS and args[0].is_floating_point() and args[0].shape[-1] == 32:
            self.events.append(_EVENTS[name])
        return func(*args, **(kwargs or {}))


_EVENTS = {
    "all_to_all_single": "start",
    "wait_tensor": "arrive",
    "fused_experts": "compute",
    "fused_experts_backward": "compute",
}


@pytest.mark.parametrize(
    ("dispatcher", "course"),
    [
        ("eager", "start arrive compute start arrive"),
        ("fused", "start start arrive compute start arrive compute start arrive arrive"),
    ],
)
def test_a_half_travels_while_the_other_is_computed(dispatcher, course):
    """In backward too. The numbers stay the same: the layouts above have both dispatchers."""
    experts = build_model("gpt_oss").model.layers[0].mlp.experts
    assert hf.apply(experts, ops=["experts"]).fused("experts")
    inputs = torch.randn(6, 32, requires_grad=True), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with start() as distributed:
        mesh = init_device_mesh(distributed.device.type, (1, 1, 1), mesh_dim_names=("dp_replicate", "efsdp", "ep"))
        apply_expert_parallel(nn.Sequential(experts), mesh, dispatcher)
        with _Course() as forward:
            output = experts(*inputs)
        with _Course() as backward:
            output.sum().backward()
    assert forward.events == backward.events == course.split()


@pytest.mark.slow
def test_architectures_equal_one_process():
    """Latent and linear attention, an indexer, several streams of hidden states, transposed weights, ..."""
    names = "qwen3_next gpt_oss mixtral minimax deepseek_v32 deepseek_v4 kimi_linear granitemoe"
    finished = launch([str(Path(__file__).with_name("architectures_worker.py")), *names.split()], 2)
    assert finished.returncode == 0, finished.stderr
