"""What the micro-batches of a step count for, where they have different numbers of targets."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_llm.accumulate import count_step, forward_backward
from mindspeed_llm.data.collate import Batch
from mindspeed_llm.foundation.distributed import start
from tests.llm.parallel.cases import build_model


def micro_batch(num_targets: int) -> Batch:
    """Eight tokens, the first of which have targets."""
    ids = torch.arange(1, 9)[None] * (num_targets + 1) % 32
    labels = torch.where(torch.arange(8) < num_targets, ids.roll(-1), -100)
    batch = Batch(input_ids=ids, labels=labels, position_ids=torch.arange(8)[None])
    batch.num_tokens = 8
    return batch


def gradient_and_loss(window: list[Batch], parity: str) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    with start() as distributed:
        fully_shard(model)
        counts = count_step(window, distributed, parity)
        loss, _ = forward_backward(model, window, counts, parity=parity)
        return model.lm_head.weight.grad.full_tensor(), loss


def test_megatron_gives_micro_batches_the_same_weight_and_reports_the_mean_over_targets():
    window = [micro_batch(1), micro_batch(6), micro_batch(0)]
    (few, few_loss), (many, many_loss), _ = (gradient_and_loss([batch], "none") for batch in window)
    ours, loss = gradient_and_loss(window, "none")
    theirs, reported = gradient_and_loss(window, "megatron")
    torch.testing.assert_close(ours, (few + 6 * many) / 7)
    torch.testing.assert_close(theirs, (few + many) / 3)  # the one without targets counts too
    assert loss == pytest.approx((few_loss + 6 * many_loss) / 7)
    assert reported == loss


def test_a_step_without_any_target_has_no_loss_and_no_gradient():
    """Peers' report E10."""
    gradient, loss = gradient_and_loss([micro_batch(0), micro_batch(0)], "none")
    assert loss == 0
    assert not gradient.any()


def test_the_balancing_loss_reaches_the_router_and_does_not_grow_with_accumulation():
    """Peers' report E13."""

    def router_gradient(micro_batches: int, coefficient: float) -> torch.Tensor:
        model = build_model("qwen3_moe")
        window = [micro_batch(6)] * micro_batches
        with start() as distributed:
            fully_shard(model)
            forward_backward(model, window, count_step(window, distributed), coefficient)
            return model.model.layers[0].mlp.gate.weight.grad.full_tensor()

    once, without = router_gradient(1, 1.0), router_gradient(1, 0.0)
    assert (once - without).norm() > 1e-3 * without.norm()
    torch.testing.assert_close(router_gradient(4, 1.0), once)
