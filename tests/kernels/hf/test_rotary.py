"""Which functions that a forward calls are rotary embeddings."""

import pytest
import torch
from torch import nn

import mindspeed_kernels
from tests.kernels.hf.modules import Attention, rotate, site


def rotate_backwards(q, k, cos, sin):
    return rotate(q, k, cos, -sin)


def rotate_queries(q, k, cos, sin):
    return rotate(q, k, cos, sin)[0], k


def rotate_first_half_only(q, k, cos, sin):
    """Takes the halves of cos and sin for equal, as an operator may not that is given any two numbers."""
    cos, sin = (t[..., : t.shape[-1] // 2].repeat(1, 1, 2) for t in (cos, sin))
    return rotate(q, k, cos, sin)


def rotate_one(x, cos, sin):
    return rotate(x, x, cos, sin)[0]


class AttentionWithOption(nn.Module):
    def forward(self, q, k, cos, sin):
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        return q.transpose(1, 2), k.transpose(1, 2)


class BackwardAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate_backwards(q, k, cos, sin)


class QueryAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate_queries(q, k, cos, sin)


class FirstHalfAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate_first_half_only(q, k, cos, sin)


class MixedAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate(q, k, cos, sin) if self.training else rotate_backwards(q, k, cos, sin)


class OneByOneAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate_one(q, cos, sin), rotate_one(k, cos, sin)


@pytest.mark.parametrize("cls", [Attention, AttentionWithOption])
def test_rotary_function_of_a_forward(cls, monkeypatch):
    module = cls()
    q, k, cos, sin = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    expected = module(q, k, cos, sin)
    assert site(module, "rotary").fused

    fused_calls = []
    fused = mindspeed_kernels.rotary
    monkeypatch.setattr(mindspeed_kernels, "rotary", lambda *a, **k: fused_calls.append(1) or fused(*a, **k))
    for a, b in zip(module(q, k, cos, sin), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert len(fused_calls) == (cls is Attention)  # a call with options is not the one that was proved


@pytest.mark.parametrize("cls", [BackwardAttention, QueryAttention, FirstHalfAttention, MixedAttention])
def test_rotations_that_differ_stay_with_a_warning(cls):
    with pytest.warns(UserWarning, match=rf"rotary: {cls.__name__} \(0\) not fused: rotate.*: differs by"):
        assert not site(cls(), "rotary").fused


def test_rotating_one_tensor_at_a_time_is_not_applicable(recwarn):
    found = site(OneByOneAttention(), "rotary")
    assert found.outcome == "not fused: rotate_one(x, cos, sin) does not take q, k, cos, sin"
    assert not recwarn
