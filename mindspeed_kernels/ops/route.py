"""The choice of experts for each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mindspeed_kernels.npu import dispatch as npu


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    expert_bias: Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts with the largest scores, and their weights, in float32 whatever the logits hold.

    Equal scores go to the lower expert, every time: recomputation makes the same choice again. (On an NPU, torch_npu's
    operator may order them otherwise, also the same every time.)
    Composed of PyTorch's own operators, so it is differentiable as often as they are.

    Args:
        logits: ``[tokens, num_experts]``.
        scoring: how logits become scores: softmax over all experts, or the sigmoid of each (DeepSeek-V3, GLM-4.5).
        expert_bias: ``[num_experts]``, added to the scores for the choice alone; it balances the experts without
            gradient (Wang et al., 2024, https://arxiv.org/abs/2408.15664).
        num_groups, top_k_groups: choose only among the experts of the best groups, of ``num_experts / num_groups``
            neighbours each. A group is as good as its two best experts together (DeepSeek-V3).
        normalize: divide a token's weights by their sum.
        scale: multiplies the weights.

    Returns:
        weights ``[tokens, top_k]``, float32 (float64 for float64 logits), and indices ``[tokens, top_k]``, int64, the
        best expert first.

    Raises:
        ValueError: the numbers do not fit together.
    """
    num_experts = logits.shape[-1]
    if num_experts % num_groups or not 1 <= top_k_groups <= num_groups:
        raise ValueError(
            f"route: {num_experts} experts cannot form {num_groups} groups, of which {top_k_groups} are chosen from"
        )
    if not 1 <= top_k <= num_experts // num_groups * top_k_groups:
        raise ValueError(
            f"route: top_k {top_k} is not in [1, {num_experts // num_groups * top_k_groups}], the number to choose from"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    choice = scores.detach() if expert_bias is None else scores.detach() + expert_bias.to(scores.dtype)
    if top_k_groups < num_groups:
        choice = _only_best_groups(choice, num_groups, top_k_groups)
    plain = scoring == "softmax" and expert_bias is None and top_k_groups == num_groups
    call = ("route", wide.detach(), top_k)
    index = npu.run(*call) if plain and npu.takes(*call) else _largest(choice, top_k)
    weights = scores.gather(-1, index)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return weights * scale, index


def _only_best_groups(choice: Tensor, num_groups: int, top_k_groups: int) -> Tensor:
    """``choice`` with -inf for the experts of all groups but the best."""
    grouped = choice.unflatten(-1, (num_groups, -1))  # [tokens, groups, experts of a group]
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, top_k_groups), True)
    return grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)


def _largest(x: Tensor, count: int) -> Tensor:
    """The indices of the largest elements of each row; ``topk`` leaves open which of equal ones it takes."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]
