"""What the tests save: a position, a small model in training, and a step that every rank takes alike."""

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_llm.checkpoint.checkpointer import TrainingState


class Position:
    """The smallest stateful thing."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same batch on every rank; gradients are summed over ranks, so each takes its share."""
    loss = model(torch.arange(12)[None], use_cache=False).logits.square().mean()
    (loss / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Experts(nn.Module):
    """One expert is never chosen and so never has a gradient; the scale is a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.scale


def training_state(seed: int = 0, steps: int = 0) -> TrainingState:
    torch.manual_seed(seed)
    model = Experts()
    # The order of groups must not matter.
    groups = [{"params": list(model.parameters())[::-1][:2]}, {"params": list(model.parameters())[:2]}]
    state = TrainingState(model, torch.optim.AdamW(groups, lr=0.1), {"place": Position()})
    for step in range(steps):
        train(state, step)
    return state


def train(state: TrainingState, step: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    state.model(x).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.model.scale += 1
