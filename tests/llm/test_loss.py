"""Padding has no part in the balancing loss, whether the model is told of it or not (faults L7)."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mindspeed_llm.batch import num_attended_pairs, to_device
from mindspeed_llm.data.collate import Batch, Collator
from mindspeed_llm.loss import cross_entropy_sum
from mindspeed_llm.routing import ExpertLoad
from tests.llm.parallel.cases import VOCAB, build_model

LENGTHS = {"packed": [[4, 3, 3], [11, 1]], "single": [[10], [3]], "mixed": [[10], [2, 3]]}


def collated(lengths: list[list[int]], multiple: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for documents in lengths:
        ids = torch.randint(0, VOCAB, (sum(documents),), generator=generator).numpy()
        rows.append({"input_ids": ids, "labels": ids, "lengths": documents})
    return Collator(pad_token_id=0, pad_to_multiple=multiple)(rows)


def of_each_row(model, lengths: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """transformers' router logits of the tokens of all rows, without padding, and their choices."""
    load = ExpertLoad(model)
    whole = collated(lengths, 1)
    layers = []
    for index, documents in enumerate(lengths):
        n = sum(documents)
        inputs = {name: whole[name][index : index + 1, :n] for name in ("input_ids", "position_ids")}
        layers.append(model(**inputs, use_cache=False, output_router_logits=True).router_logits)
    return tuple(torch.cat(parts) for parts in zip(*layers, strict=True)), load.take()


@pytest.mark.parametrize("kind", list(LENGTHS))
def test_padding_is_not_balanced(kind):
    logits, expected_load = of_each_row(build_model("qwen3_moe"), LENGTHS[kind])
    expected = load_balancing_loss_func(logits, 4, 2)
    model = build_model("qwen3_moe")
    load = ExpertLoad(model)
    batch = collated(LENGTHS[kind], 40)
    assert batch["input_ids"].shape == (2, 40)
    assert ("attention_mask" in batch) == (kind == "single") == (batch.token_mask is None)
    hooks = len(model._forward_pre_hooks), len(model.base_model._forward_hooks)
    _, aux_loss = cross_entropy_sum(model, to_device(batch, torch.device("cpu")), with_aux_loss=True)
    torch.testing.assert_close(aux_loss, expected, rtol=1e-6, atol=0)
    assert load.take() == expected_load
    assert (len(model._forward_pre_hooks), len(model.base_model._forward_hooks)) == hooks
    plain = {name: x for name, x in batch.items() if name in ("input_ids", "position_ids")}
    with_padding = model(**plain, use_cache=False, output_router_logits=True).aux_loss
    assert abs(with_padding - expected) > 0.01 * expected


def test_padding_attends_to_nothing_that_is_counted():
    assert num_attended_pairs(collated([[4, 3, 3], [11, 1]], 40)) == 10 + 6 + 6 + 66 + 1


def test_a_batch_of_padding_has_no_loss_and_a_finite_balancing_loss():
    """That of a rank which has no rows when others do."""
    model = build_model("qwen3_moe")
    load = ExpertLoad(model)
    batch = Collator(pad_token_id=0)([])
    loss, aux_loss = cross_entropy_sum(model, to_device(batch, torch.device("cpu")), with_aux_loss=True)
    assert loss == 0
    assert torch.isfinite(aux_loss)
    assert sum(load.take()) == 0
