"""The loss from inside the head: only where the model returns its head's output, and equal to that of the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.loss import cross_entropy_sum
from mindspeed_llm.models.loss_head import fuse_loss, loss_requested, why_not
from mindspeed_llm.models.skeleton import parameters_on_meta
from tests.distributed import launch
from tests.llm.parallel.cases import MODELS, VOCAB, build_model

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CHANGED = {
    "gemma2": Gemma2Config(**_SHAPE, final_logit_softcapping=30.0),
    "cohere": CohereConfig(**_SHAPE, logit_scale=0.5),
    "granite": GraniteConfig(**_SHAPE, logits_scaling=3.0),
}


def batch(*, targets: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, VOCAB, (2, 2, 11), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < (0.4 if targets else 2.0)] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(11).expand(2, 11)}


def loss_and_gradients(model: PreTrainedModel, data: dict, *, aux: float = 0.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss, aux_loss = cross_entropy_sum(model, data, with_aux_loss=aux > 0)
    (loss / 7 + (aux * aux_loss if aux_loss is not None else 0)).backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To 1e-6 and 1e-5, or to the rounding of the whole gradient: sums over experts cancel in the bias of a router."""
    assert actual.keys() == expected.keys()
    rounding = torch.finfo(torch.float32).eps * torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        error = (actual[name] - value).norm()
        assert error <= (1e-6 if name == "loss" else 1e-5) * value.norm() + rounding, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", sorted(MODELS.keys() - CHANGED.keys()))
def test_equals_the_loss_of_the_logits(name: str) -> None:
    """Every architecture of the parallel tests, tied embeddings among them, some with an auxiliary loss."""
    plain, fused = build_model(name), build_model(name)
    assert fuse_loss(fused, chunk=5)
    aux = 0.1 if name in ("qwen3_moe", "qwen2_moe") else 0.0
    assert_equal(loss_and_gradients(fused, batch(), aux=aux), loss_and_gradients(plain, batch(), aux=aux))
    with torch.no_grad():
        torch.testing.assert_close(
            cross_entropy_sum(fused, batch())[0], cross_entropy_sum(plain, batch())[0], rtol=1e-6, atol=0
        )


def test_no_targets_are_a_loss_of_zero_with_a_graph() -> None:
    model = build_model("tied_llama")
    fuse_loss(model, chunk=None)
    result = loss_and_gradients(model, batch(targets=False))
    assert result.pop("loss") == 0
    assert len(result) == len(list(model.parameters()))
    assert all(not gradient.any() for gradient in result.values())


def test_half_precision_is_as_exact_as_that_of_the_logits() -> None:
    expected = loss_and_gradients(build_model("qwen3").double(), batch())
    errors = {}
    for fused in (False, True):
        model = build_model("qwen3").bfloat16()
        if fused:
            assert fuse_loss(model, chunk=4)
        result = loss_and_gradients(model, batch())
        errors[fused] = {n: ((result[n].double() - e).norm() / e.norm()).item() for n, e in expected.items()}
    for name in expected:
        assert errors[True][name] < 1.5 * errors[False][name] + 0.004, name


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_changes_its_logits_keeps_its_way(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CHANGED[name])
    assert "changes the logits" in why_not(model)
    assert not fuse_loss(model, chunk=None)
    assert type(model.get_output_embeddings()) is nn.Linear
    with loss_requested(model, batch()["labels"]) as request:
        assert request is None


def test_a_model_with_another_head_keeps_its_way() -> None:
    model = build_model("qwen3")
    model.lm_head = nn.Sequential(nn.Linear(32, VOCAB))
    assert "Sequential, not a plain linear layer" in why_not(model)


def test_a_model_that_cuts_its_positions_keeps_its_way() -> None:
    class LastOnly(LlamaForCausalLM):
        def forward(self, **inputs):
            return super().forward(**inputs, logits_to_keep=1)

    assert "and not once on all positions" in why_not(LastOnly(MODELS["tied_llama"]))


def test_a_model_whose_forward_cannot_be_followed_keeps_its_way() -> None:
    class Curious(LlamaForCausalLM):
        def forward(self, **inputs):
            return super().forward(**inputs, inputs_embeds=self.model.embed_tokens(inputs.pop("input_ids")))

    assert "cannot be followed" in why_not(Curious(MODELS["tied_llama"]))


def test_is_proved_without_weights() -> None:
    """Also of an older model that takes the layers' output as a tuple."""
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4))
    assert why_not(model) is None
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_model_still_has_logits() -> None:
    model = build_model("qwen3")
    fuse_loss(model, chunk=None)
    cross_entropy_sum(model, batch())
    assert model(input_ids=batch()["input_ids"]).logits.shape == (2, 11, VOCAB)


def test_a_model_that_changes_its_loss_after_all_is_an_error() -> None:
    """What the proof has not seen is not believed."""

    class Later(LlamaForCausalLM):
        scaled = False

        def forward(self, **inputs):
            output = super().forward(**inputs)
            if self.scaled:
                output.logits = 2 * output.logits
            return output

    model = Later(MODELS["tied_llama"])
    assert fuse_loss(model, chunk=None)
    model.scaled = True
    with pytest.raises(RuntimeError, match=r"Later does not return what its head computes.*chunk_loss_size: 0"):
        cross_entropy_sum(model, batch())
    assert "loss_request" not in vars(model.lm_head)


def test_equals_the_loss_of_the_logits_on_two_ranks() -> None:
    finished = launch([str(Path(__file__).with_name("loss_head_worker.py"))], 2)
    assert finished.returncode == 0, finished.stderr
