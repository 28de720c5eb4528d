"""How the proof is made: that it sees gradients, and that it leaves no trace."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import mindspeed_kernels
from mindspeed_kernels import hf
from tests.kernels.hf.modules import MLP, Attention, Norm, site


@pytest.mark.parametrize(
    ("op", "module"), [("rms_norm", Norm()), ("swiglu", MLP()), ("rotary", Attention())], ids=lambda v: str(v)[:8]
)
def test_a_wrong_gradient_of_the_operator_is_seen(op, module, monkeypatch):
    """The proof holds the operators to account too: right values with wrong gradients do not pass."""

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.00001

    fused = getattr(mindspeed_kernels, op)
    monkeypatch.setattr(mindspeed_kernels, op, lambda x, *a, **k: fused(WrongGradient.apply(x), *a, **k))
    with pytest.warns(UserWarning, match="not fused: .*differs by .*e-05 in float32"):
        assert not site(module, op).fused


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        default_dtype(torch.bfloat16),
    ],
    ids=["no_grad", "inference_mode", "autocast", "meta device", "default dtype"],
)
def test_the_callers_modes_and_random_state_do_not_matter(mode):
    model = nn.ModuleList([Norm(), MLP(), Attention()])
    state = torch.get_rng_state()
    with mode:
        report = hf.apply(model)
    assert [found.fused for found in report.sites] == [True, True, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_each_kind_is_compared_once(monkeypatch):
    calls = []
    fused = mindspeed_kernels.rms_norm
    monkeypatch.setattr(mindspeed_kernels, "rms_norm", lambda *a, **k: calls.append(1) or fused(*a, **k))
    hf.apply(nn.Sequential(Norm()))
    once = len(calls)
    report = hf.apply(nn.Sequential(*(Norm() for _ in range(5)), Norm(eps=1e-5)))
    assert len(calls) == 3 * once  # two kinds, of which one had been compared for another model
    assert [found.proof.fusion.eps for found in report.sites] == [1e-6] * 5 + [1e-5]
