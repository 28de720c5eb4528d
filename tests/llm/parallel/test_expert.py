"""Expert parallelism equals one plain PyTorch process, in every combination with the other layouts.

Gradients are compared, not losses alone: AdamW hides a wrong scale of the experts' (peers' reports E5 and E28).
"""

from itertools import product
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
from tests.llm.parallel.cases import build_model, combinations
from tests.llm.parallel.test_equivalence import case, check

LAYOUTS = {
    "ep2": (2, {"ep_size": 2}),
    "ep2_efsdp2": (4, {"ep_size": 2}),
    "ep4": (4, {"ep_size": 4}),
    "hsdp2_ep2": (4, {"ep_size": 2, "dp_replicate_size": 2, "fsdp_size": 2}),
}
MODELS = ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "lopsided"]
FEW = [
    case("qwen3_moe", 2, accumulation=3, aux=0.1, ep_size=2),
    case("gpt_oss", 2, packed=True, recompute=True, num_to_backward_prefetch=0, ep_size=2, ep_dispatcher="fused"),
    case("lopsided", 2, packed=True, accumulation=3, ep_size=2),  # a rank without any tokens to compute (E29)
    case("qwen2_moe", 4, accumulation=3, recompute=True, recompute_mode="selective", ep_size=2),
    case("deepseek_v3", 4, packed=True, accumulation=3, ep_size=2, dp_replicate_size=2, fsdp_size=2),
    case("lopsided", 4, recompute=True, ep_size=4),
    case("qwen3_moe", 4, packed=True, recompute=True, recompute_mode="selective", ep_size=2, ep_dispatcher="fused")
    | {"fused_experts": True},
    case("gpt_oss", 4, accumulation=3, ep_size=4) | {"fused_experts": True},
    case("lopsided", 2, accumulation=3, ep_size=2, ep_dispatcher="fused") | {"fused_experts": True},
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks, tmp_path):
    check([case for case in FEW if case["ranks"] == ranks], ranks, tmp_path)


@pytest.mark.parametrize(("model", "layout"), combinations(MODELS, list(LAYOUTS)))
def test_every_combination_equals_one_process(model, layout, tmp_path):
    ranks, sizes = LAYOUTS[layout]
    aux = 0.1 if model in ("qwen3_moe", "gpt_oss") else 0.0
    cases = [
        case(model, ranks, accumulation=accumulation, packed=packed, aux=aux, recompute=recompute, **sizes)
        for accumulation, packed, recompute in product((1, 3), (False, True), (False, True))
    ]
    check(cases, ranks, tmp_path)


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
