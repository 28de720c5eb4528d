"""Modules that have the structure of an operator's site, whole or with one thing changed."""

import torch
from torch import nn

from mindspeed_kernels import hf


def site(module: nn.Module, op: str) -> hf.Site:
    """What becomes of a module as the one site of an operator."""
    (found,) = hf.apply(nn.Sequential(module), [op]).sites
    return found


class Norm(nn.Module):
    """An RMSNorm whose parts the tests exchange."""

    def __init__(self, hidden_size: int = 32, eps: float = 1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.epsilon = eps

    def factor(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, x):
        wide = x.float()
        return self.scale * (wide * self.factor(wide)).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, bias: bool = False, limit: float | None = None, multiplier: float = 1.0, activation=None):
        super().__init__()
        self.w1 = nn.Linear(16, 24, bias=bias)
        self.w2 = nn.Linear(24, 16, bias=bias)
        self.w3 = nn.Linear(16, 24, bias=bias)
        self.activation = activation or nn.SiLU()
        self.limit, self.multiplier = limit, multiplier

    def forward(self, x):
        gate, up = self.w1(x) * self.multiplier, self.w3(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.w2(self.activation(gate) * up)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate(q, k, cos, sin)
