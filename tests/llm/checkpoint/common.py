"""A position to save, and a step of training that every rank takes alike."""

import torch
import torch.distributed as dist


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
