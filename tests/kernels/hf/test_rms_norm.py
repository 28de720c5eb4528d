"""Which norms are RMSNorms, and which of its conventions they follow."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_kernels import hf
from tests.kernels.hf.modules import Norm, site


class Float32Norm(Norm):
    def forward(self, x):
        wide = x.float()
        return (self.scale.float() * wide * self.factor(wide)).to(x.dtype)


class ZeroCenteredNorm(Norm):
    def forward(self, x):
        wide = x.float()
        return ((1 + self.scale.float()) * wide * self.factor(wide)).to(x.dtype)


class ZeroCenteredHfNorm(Norm):
    def forward(self, x):
        wide = x.float()
        return (1 + self.scale) * (wide * self.factor(wide)).to(x.dtype)


@pytest.mark.parametrize(
    ("cls", "zero_centered", "cast_order"),
    [
        (Norm, False, "hf"),
        (Float32Norm, False, "float32"),
        (ZeroCenteredNorm, True, "float32"),
        (ZeroCenteredHfNorm, True, "hf"),
    ],
)
@pytest.mark.parametrize("hidden_size", [16, 576])
def test_conventions_are_detected(cls, zero_centered, cast_order, hidden_size):
    fusion = site(cls(hidden_size, eps=1e-5), "rms_norm").proof.fusion
    assert (fusion.eps, fusion.zero_centered, fusion.cast_order) == (1e-5, zero_centered, cast_order)


def test_the_right_one_of_two_constants_is_found():
    module = Norm(eps=1e-6)
    module.initializer_range = 1e-5
    assert site(module, "rms_norm").proof.fusion.eps == 1e-6


class EpsOutsideTheRoot(Norm):
    def factor(self, x):
        return 1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon)


class EpsAsMinimum(Norm):
    def factor(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(self.epsilon))


class L2Norm(Norm):
    def factor(self, x):
        return torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.epsilon)


class MeanAbsoluteNorm(Norm):
    def factor(self, x):
        return 1 / (x.abs().mean(-1, keepdim=True) + self.epsilon)


class DetachedNorm(Norm):
    """The forward of an RMSNorm, and another backward."""

    def factor(self, x):
        return super().factor(x).detach()


class ClampedNorm(Norm):
    def forward(self, x):
        return super().forward(x).clamp(-3, 3)


class WeightSquaredNorm(Norm):
    """Equal to an RMSNorm while the weight is all ones, as it is at the start of training."""

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    "module",
    [
        EpsOutsideTheRoot(),
        EpsAsMinimum(),
        L2Norm(),
        MeanAbsoluteNorm(),
        DetachedNorm(),
        ClampedNorm(),
        WeightSquaredNorm(),
        nn.LayerNorm(32, bias=False, eps=1e-6),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norms_that_differ_stay_with_a_warning(module):
    with pytest.warns(UserWarning, match=rf"rms_norm: {type(module).__name__} \(0\) not fused: differs by"):
        found = site(module, "rms_norm")
    assert not found.fused


class GatedNorm(Norm):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x * F.silu(gate))


class FailingNorm(Norm):
    def forward(self, x):
        raise RuntimeError("only with a cache")


@pytest.mark.filterwarnings("ignore:rms_norm. FailingNorm")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LayerNorm(32), "has the parameters weight, bias, an RMSNorm has one weight"),
        (GatedNorm(), "forward takes x, gate"),
        (FailingNorm(), "cannot be compared in float32: RuntimeError: only with a cache"),
    ],
    ids=["LayerNorm", "GatedNorm", "FailingNorm"],
)
def test_other_norms_say_why_not(module, reason):
    assert site(module, "rms_norm").outcome == f"not fused: {reason}"


@pytest.mark.parametrize(
    "module", [nn.SiLU(), nn.Dropout(0.1), nn.Linear(4, 4), nn.Embedding(4, 4), nn.Conv1d(4, 4, 1)]
)
def test_other_modules_are_no_sites(module):
    assert hf.apply(nn.Sequential(module)).sites == ()
