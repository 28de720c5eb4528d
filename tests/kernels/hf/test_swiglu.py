"""Which MLPs are SwiGLUs, and which of their layers is what."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.kernels.hf.modules import MLP, site


class SwappedMLP(MLP):
    def forward(self, x):
        return self.w2(self.w1(x) * self.activation(self.w3(x)))


class SquareMLP(MLP):
    """Three layers of one size, whose roles the sizes do not tell."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(16, 16) for _ in range(3))


class UpFirstMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_gate, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x):
        up, gate = self.up_gate(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize(
    ("module", "gate", "up", "down"),
    [
        (MLP(), "w1", "w3", "w2"),
        (MLP(bias=True), "w1", "w3", "w2"),
        (MLP(activation=F.silu), "w1", "w3", "w2"),
        (MLP(activation=nn.SiLU(inplace=True)), "w1", "w3", "w2"),
        (SwappedMLP(), "w3", "w1", "w2"),
        (SquareMLP(), "w1", "w3", "w2"),
    ],
    ids=["plain", "bias", "function", "in place", "swapped", "square"],
)
def test_gate_up_and_down_are_told_apart(module, gate, up, down):
    fusion = site(module, "swiglu").proof.fusion
    assert (fusion.gate, fusion.up, fusion.down) == (gate, up, down)
    x = torch.randn(5, 16)
    assert torch.allclose(module(x), type(module).__bases__[0].forward(module, x), atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [MLP(limit=7.0), MLP(limit=100.0), MLP(multiplier=1.001), MLP(activation=F.gelu), UpFirstMLP()],
    ids=["limit 7", "limit 100", "multiplier", "gelu", "up first"],
)
def test_gated_mlps_that_differ_stay_with_a_warning(module):
    with pytest.warns(UserWarning, match=rf"swiglu: {type(module).__name__} \(0\) not fused: differs by"):
        assert not site(module, "swiglu").fused


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.Sigmoid()], ids=repr)
def test_another_activation_is_not_applicable(activation, recwarn):
    found = site(MLP(activation=activation), "swiglu")
    assert found.outcome == f"not fused: the activation {type(activation).__name__} is not SiLU"
    assert not recwarn
