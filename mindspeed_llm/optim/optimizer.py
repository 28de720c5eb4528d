"""OptimizerFactory: which parameters decay, and the optimizer over them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.optim.adamw import AdamW
from mindspeed_llm.optim.muon import Muon, hidden_matrices


class OptimizerFactory:
    """Builds the optimizer that ``training.optimizer`` names, over float32 master weights."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training

    def create(self, model: PreTrainedModel) -> AdamW:
        """AdamW (Loshchilov & Hutter, 2019) in one fused pass, or Muon with AdamW for what is no hidden matrix."""
        options = self.training
        is_muon = options.optimizer == "muon"
        return (Muon if is_muon else AdamW)(
            parameter_groups(model, options.weight_decay, orthogonal=hidden_matrices(model) if is_muon else set()),
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
        )


def parameter_groups(
    model: nn.Module, weight_decay: float, orthogonal: Collection[torch.Tensor] = frozenset()
) -> list[dict]:
    """Up to three groups of the trainable parameters in the model's order: orthogonalized, decayed, neither.

    Scales and shifts are not decayed: every vector or scalar (norm weights, biases, ``A_log``, ``dt_bias``) and the
    stacked biases of experts, which are matrices called ``*bias``.
    """
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter in orthogonal:
            matrices.append(parameter)
        else:
            (exempt if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    groups: list[dict] = [
        {"params": matrices, "weight_decay": weight_decay, "orthogonal": True},
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
