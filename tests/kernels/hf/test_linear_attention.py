"""Linear attention of whole models: which is fused, packed documents that do not see each other, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet, torch_chunk_gated_delta_rule

from mindspeed_kernels import hf
from mindspeed_kernels.hf.rotary import with_globals
from tests.kernels.hf.models import FAMILIES, build, distance, make, run, token_by_token, tokens

HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # Kimi Linear's, and its latent attention.
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # Every expert takes every token: with fewer, a rounding error that moves a token to another expert is a jump.
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
OPS = ("rms_norm_gated", "linear_attention", "documents")


def packed(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "olmo_hybrid", "kimi_linear"])
def test_other_families(model_type: str) -> None:
    model = make(model_type, HEADS)
    logits, _ = run(model)
    _, gradients = run(token_by_token(model))
    report = hf.apply(model, OPS)
    # Documents: of the layer, and of the model.
    assert {op: len(report.fused(op)) for op in OPS} == dict.fromkeys(OPS, 1) | {"documents": 2}
    fused_logits, fused_gradients = run(model)
    assert not torch.equal(fused_logits, logits)
    assert distance({"logits": fused_logits}, {"logits": logits}) < 5e-6
    assert distance(fused_gradients, gradients) < 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_packed_documents_are_strangers(model_type: str) -> None:
    """What another document holds moves neither the logits nor the gradients of one by a bit."""
    model = make(model_type, FAMILIES["qwen3_next"].options | HEADS, dtype=torch.bfloat16)
    hf.use_attention(model)
    hf.apply(model)
    ids, position_ids = tokens(1, 30), packed(11, 19)

    def second(ids: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        logits = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits[:, -19:]
        # Of parameters whose gradient is a sum over tokens: those of other documents must add nothing to it.
        return logits, *torch.autograd.grad(logits.float().square().sum(), list(model.model.layers[0].parameters()))

    changed = ids.clone()
    changed[:, :11] = (ids[:, :11] + 5) % 100 + 3
    for before, after in zip(second(ids, position_ids), second(changed, position_ids), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_packed_documents_come_out_as_alone(model_type: str) -> None:
    model = make(model_type, FAMILIES["qwen3_next"].options | HEADS)
    ids, lengths = tokens(1, 30), (11, 1, 18)
    alone = [
        model(input_ids=part, use_cache=False).logits.detach() for part in ids.split(lengths, 1)
    ]  # by transformers' own code
    hf.use_attention(model)
    hf.apply(model)
    together = model(input_ids=ids, position_ids=packed(*lengths), use_cache=False).logits.detach()
    assert distance({"logits": together}, {"logits": torch.cat(alone, 1)}) < 5e-6


@pytest.mark.parametrize("padding", [0, 1])
def test_rows_with_an_attention_mask_are_not_packed(padding: int) -> None:
    """As transformers has it: there, positions that start again mean nothing."""
    model = build("qwen3_next")
    arguments = {"input_ids": tokens(1, 9), "position_ids": packed(4, 5), "use_cache": False}
    mask = torch.tensor([[0] * padding + [1] * (9 - padding)])
    expected = model(**arguments, attention_mask=mask).logits.detach()
    hf.apply(model)
    logits = model(**arguments, attention_mask=mask).logits.detach()
    assert distance({"logits": logits}, {"logits": expected}) < 5e-6


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_generation_with_a_cache(model_type: str) -> None:
    model = make(model_type, FAMILIES["qwen3_next"].options | HEADS).eval()
    expected = model.generate(tokens(), max_new_tokens=6, do_sample=False)
    hf.apply(model)
    assert torch.equal(model.generate(tokens(), max_new_tokens=6, do_sample=False), expected)


def test_rows_with_a_cache_are_not_packed() -> None:
    """As transformers has it. The state in the cache is that of the row, and the next token goes on from it."""
    model = build("qwen3_next").eval()
    ids, position_ids = tokens(1, 9), packed(4, 5)

    def two_calls() -> dict[str, Tensor]:
        first = model(input_ids=ids, position_ids=position_ids, use_cache=True)
        cache = first.past_key_values
        second = model(input_ids=ids[:, :1], position_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
        return {"first": first.logits.detach(), "second": second.logits.detach()}

    expected = two_calls()
    hf.apply(model)
    assert distance(two_calls(), expected) < 5e-6


class ByHeadAndChannel(Qwen3NextGatedDeltaNet):
    def unlike(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False):
        raise RuntimeError("a decay of neither kind")

    forward = with_globals(Qwen3NextGatedDeltaNet.forward, {"torch_chunk_gated_delta_rule": unlike})


def test_a_decay_of_neither_kind_stays() -> None:
    model = build("qwen3_next")
    model.model.layers[0].linear_attn.__class__ = ByHeadAndChannel
    report = hf.apply(model, OPS)
    assert [site.outcome for site in report.sites if site.op == "linear_attention"] == [
        "not fused: torch_chunk_gated_delta_rule takes no decay per head or per channel"
    ]


def forgetful(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **kwargs,
):
    """A delta rule that forgets a little more."""
    options = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    return torch_chunk_gated_delta_rule(query, key, value, g=1.01 * g, beta=beta, **options)


class OtherMixer(Qwen3NextGatedDeltaNet):
    forward = with_globals(Qwen3NextGatedDeltaNet.forward, {"torch_chunk_gated_delta_rule": forgetful})


def test_another_computation_is_seen() -> None:
    model = build("qwen3_next")
    model.model.layers[0].linear_attn.__class__ = OtherMixer
    with pytest.warns(UserWarning, match="linear_attention: OtherMixer .* differs by"):
        report = hf.apply(model, OPS)
    assert report.fused("linear_attention") == []


class DeafLayer(nn.Module):
    """A layer that does not pass on what it does not know."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states, position_ids=None, **kwargs):
        return self.mixer(hidden_states)


def test_a_layer_that_keeps_its_arguments_is_seen() -> None:
    mixer = build("qwen3_next").model.layers[0].linear_attn
    with pytest.warns(UserWarning, match="documents: DeafLayer .* mixer does not get the layer's keyword arguments"):
        hf.apply(nn.Sequential(DeafLayer(mixer)), ["documents"])


def test_one_family_has_all_of_it() -> None:
    assert all(getattr(FAMILIES["qwen3_next"], op) for op in OPS)
