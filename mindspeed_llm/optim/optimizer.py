"""OptimizerFactory: which parameters decay, and the optimizer over them."""

from __future__ import annotations

from torch import nn

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.optim.adamw import AdamW


class OptimizerFactory:
    """Builds the optimizer that ``training.optimizer`` names, over float32 master weights."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training

    def create(self, model: nn.Module) -> AdamW:
        """AdamW (Loshchilov & Hutter, 2019) in one fused pass, with decoupled decay on matrices only."""
        options = self.training
        return AdamW(
            parameter_groups(model, options.weight_decay),
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
        )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, with and without decay, of the trainable parameters in the model's order.

    Scales and shifts are not decayed: every vector or scalar (norm weights, biases, ``A_log``, ``dt_bias``) and the
    stacked biases of experts, which are matrices called ``*bias``.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (exempt if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    groups: list[dict] = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
