"""Arithmetic of a training step, counted from the model's structure: the numerator of model FLOPs utilisation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TrainingFlops:
    """Multiply-adds of forward and backward: 2 FLOP each, once forward and twice backward (dX and dW)."""

    matmul_parameters: int
    """Weights that every token is multiplied with: all matrices, and of the experts only the routed share."""
    attention_width: int
    """Σ over layers of heads x (key head_dim + value head_dim): multiply-adds per (query, key) pair."""

    def of(self, tokens: float, attended_pairs: float) -> float:
        """FLOP of ``tokens`` tokens that attend to ``attended_pairs`` (query, key) pairs, without recomputation."""
        return 6.0 * (self.matmul_parameters * tokens + self.attention_width * attended_pairs)


def count_training_flops(model: PreTrainedModel) -> TrainingFlops:
    """Read the counts off the modules of ``model`` (weights may be on the meta device)."""
    config = model.config.get_text_config()
    num_experts = _num_experts(config)
    head = model.get_output_embeddings()
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matmul = (
        head.weight.numel() if head is not None and id(head.weight) in lookups else 0
    )  # tied: a lookup and a matrix
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and id(parameter) not in lookups and not name.endswith("bias"):
            matmul += parameter.numel()
        elif parameter.ndim == 3 and parameter.shape[0] == num_experts:
            matmul += parameter.numel() * config.num_experts_per_tok // num_experts
    heads = getattr(config, "num_attention_heads", 0)
    key_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    value_dim = getattr(config, "v_head_dim", None) or key_dim
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum("linear" not in kind for kind in kinds)
    return TrainingFlops(matmul, layers * heads * (key_dim + value_dim))


def _num_experts(config: object) -> int | None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return getattr(config, name)
    return None
