"""attn_implementation="mindspeed": the same numbers as eager attention, for every kind of batch and mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from mindspeed_kernels import hf
from mindspeed_kernels.hf.attention import attend
from mindspeed_kernels.hf.attention_mask import AttentionMask, make_mask
from tests.kernels.dense_attention import visible_batch
from tests.kernels.hf.models import distance, make, tokens

hf.register_attention()

SLIDING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "gemma2": ("gemma2", {"sliding_window": 5, "layer_types": SLIDING, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "layer_types": SLIDING, "query_pre_attn_scalar": 9}),
    "gpt_oss": ("gpt_oss", EXPERTS | {"sliding_window": 5, "layer_types": SLIDING}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "first_k_dense_replace": 2,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 5,
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [],
            "intermediate_size_mlp": 48,
        },
    ),
}
SEQ = 14


def positions(*rows: tuple[int, ...]) -> Tensor:
    """``position_ids`` of rows that hold documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def padding(*rows: tuple[int, int]) -> Tensor:
    """``attention_mask`` of rows with tokens from start to end."""
    index = torch.arange(SEQ)
    return torch.stack([(start <= index) & (index < end) for start, end in rows]).long()


BATCHES: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "packed": {"position_ids": positions((5, 3, 6), (1, 13))},
    "padded right": {"attention_mask": padding((0, SEQ), (0, 9))},
    "padded left": {"attention_mask": padding((6, SEQ), (0, SEQ))},
    # transformers' way of saying that documents do see each other
    "leaking": {"attention_mask": padding((0, SEQ), (0, SEQ)), "position_ids": positions((5, 3, 6), (1, 13))},
    "padded all over": {"attention_mask": padding((3, 11), (0, 0))},
}


def run(model: PreTrainedModel, batch: dict[str, Tensor], ids: Tensor | None = None) -> dict[str, Tensor]:
    """Logits of the tokens, and gradients of the loss."""
    model.zero_grad()
    ids = tokens(2, SEQ) if ids is None else ids
    is_token = batch.get("attention_mask", torch.ones(2, SEQ)).bool()
    logits = model(input_ids=ids, use_cache=False, **batch).logits
    targets = ids.roll(-1, 1)[is_token]
    torch.nn.functional.cross_entropy(logits[is_token], targets).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits[is_token].detach(), **gradients}


# transformers' own gpt-oss lets packed documents see each other; test_packed_documents_are_those_alone has that pair.
PAIRS = sorted(set(itertools.product(MODELS, BATCHES)) - {("gpt_oss", "packed")})


@pytest.mark.parametrize(("family", "batch"), PAIRS)
def test_equals_eager(family: str, batch: str) -> None:
    model = make(*MODELS[family])
    expected = run(model, BATCHES[batch])
    model.set_attn_implementation("mindspeed")
    actual = run(model, BATCHES[batch])
    assert not torch.equal(actual["logits"], expected["logits"])  # another computation, and
    # rounding errors of float32 (6e-8 each) add up over two layers and the sums in them.
    assert distance(actual, expected) < 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_packing_does_not_leak(family: str) -> None:
    """Another token in the first document does not move the second by one bit, neither its logits nor its gradient."""
    model = make(*MODELS[family])
    model.set_attn_implementation("mindspeed")
    batch = {"position_ids": positions((5, 9), (5, 9))}
    results = []
    for token in (7, 8):
        ids = tokens(2, SEQ)
        ids[:, 2] = token
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, use_cache=False, **batch).logits
        (grad,) = torch.autograd.grad(logits[:, 5:].square().sum(), embeds)
        assert (grad[:, :5] == 0).all()
        results.append((logits[:, :5], logits[:, 5:], grad[:, 5:]))
    (first, *second), (other_first, *other_second) = results
    assert not torch.equal(first[:, 2:], other_first[:, 2:])
    assert all(map(torch.equal, second, other_second))


@pytest.mark.parametrize("family", MODELS)
def test_packed_documents_are_those_alone(family: str) -> None:
    model = make(*MODELS[family])
    ids = tokens(1, SEQ)
    alone = [model(part, use_cache=False).logits for part in ids.split((5, 3, 6), 1)]
    model.set_attn_implementation("mindspeed")
    packed = model(ids, position_ids=positions((5, 3, 6)), use_cache=False).logits
    assert distance({"logits": packed}, {"logits": torch.cat(alone, 1)}) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_generation_with_padded_prompts(family: str) -> None:
    """One query and a growing cache, also one that keeps no more than the window."""
    model = make(*MODELS[family]).eval()
    arguments = {
        "attention_mask": padding((6, SEQ), (0, SEQ)),
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(tokens(2, SEQ), **arguments)
    model.set_attn_implementation("mindspeed")
    actual = model.generate(tokens(2, SEQ), **arguments)
    assert torch.equal(actual.sequences, expected.sequences)
    for a, e in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_bidirectional() -> None:
    model = make("llama", {"is_causal": False})
    for batch in ("plain", "padded left"):
        model.set_attn_implementation("eager")
        expected = run(model, BATCHES[batch])
        model.set_attn_implementation("mindspeed")
        assert distance(run(model, BATCHES[batch]), expected) < 1e-5
    causal = run(make("llama", {}), BATCHES["plain"])
    assert distance(causal, run(model, BATCHES["plain"])) > 1e-2


def test_gradient_checkpointing() -> None:
    model = make(*MODELS["gemma3"])
    model.set_attn_implementation("mindspeed")
    expected = run(model, BATCHES["packed"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    actual = run(model, BATCHES["packed"])
    assert all(torch.equal(actual[name], e) for name, e in expected.items())


def test_padding_gives_zero() -> None:
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, heads, SEQ, 8) for heads in (4, 2, 2))
    mask = make_mask(2, SEQ, SEQ, attention_mask=BATCHES["padded right"]["attention_mask"].bool())
    out, probabilities = attend(module, q, k, v, mask, scaling=0.3, s_aux=torch.randn(4))
    assert out.shape == (2, SEQ, 4, 8)
    assert probabilities is None
    assert (out[1, 9:] == 0).all()
    assert (out[1, :9] != 0).all()


def test_autocast() -> None:
    """Rotary makes float32 of q and k while v is bfloat16: no further from the float32 model than its own attention.

    Twice its distance, as both are sums of the same number of roundings that fall differently.
    """
    model = make(*MODELS["llama"])
    exact = model(tokens(), use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(tokens(), use_cache=False).logits
        model.set_attn_implementation("mindspeed")
        ours = model(tokens(), use_cache=False).logits
    assert ours.dtype == theirs.dtype
    assert 0 < (ours - exact).norm() <= 2 * (theirs - exact).norm()


# ---- Masks.


def expand(mask: AttentionMask, batch: int, q_length: int, kv_length: int) -> Tensor:
    """``[batch, q_length, kv_length]`` by the operator's own rule."""
    options: dict[str, Any] = {"causal": mask.causal, "window": mask.window}
    q, k = torch.empty(batch, q_length, 1, 1), torch.empty(batch, kv_length, 1, 1)
    if mask.cu_seqlens_q is None:
        return visible_batch(q, k, options | {"query_offsets": mask.query_offsets})
    q_index = torch.arange(batch * q_length) if mask.query_index is None else mask.query_index
    k_index = torch.arange(batch * kv_length) if mask.key_index is None else mask.key_index
    options |= {"cu_seqlens_q": mask.cu_seqlens_q, "cu_seqlens_k": mask.cu_seqlens_k}
    whole = torch.zeros(batch * q_length, batch * kv_length, dtype=torch.bool)
    whole[q_index[:, None], k_index] = visible_batch(q.flatten(0, 1)[q_index], k.flatten(0, 1)[k_index], options)[0]
    blocks = whole.view(batch, q_length, batch, kv_length)
    rows = torch.arange(batch)
    assert whole.sum() == blocks[rows, :, rows].sum(), "a row sees another row"
    return blocks[rows, :, rows]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_masks_are_those_of_transformers(data: st.DataObject) -> None:
    draw = data.draw
    batch, seq = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["causal", "sliding", "chunked", "bidirectional", "bidirectional sliding"]))
    size = draw(st.integers(1, 14))
    function: Callable = {
        "causal": masking_utils.causal_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(size),
        "bidirectional": masking_utils.bidirectional_mask_function,
        "bidirectional sliding": masking_utils.sliding_window_bidirectional_mask_function(size),
    }.get(kind)
    given_mask, batch_kind = None, draw(st.sampled_from(["plain", "padded", "packed", "cached", "cached, padded"]))
    q_offset, q_length, kv_length = 0, seq, seq
    if batch_kind.startswith("cached"):
        q_length = draw(st.integers(1, seq))
        q_offset = seq - q_length
    if batch_kind.endswith("padded"):
        starts = [draw(st.integers(0, seq)) for _ in range(batch)]
        stops = [seq if batch_kind.startswith("cached") else draw(st.integers(start, seq)) for start in starts]
        index = torch.arange(seq)
        given_mask = torch.stack([(a <= index) & (index < b) for a, b in zip(starts, stops, strict=True)])
    left = torch.zeros(batch, dtype=torch.int64) if given_mask is None else (given_mask.cumsum(-1) == 0).sum(-1)
    if kind == "chunked":
        function = masking_utils.chunked_causal_mask_function(size, left)
        if batch_kind.startswith("cached"):
            return
    if batch_kind == "packed":
        cuts = [draw(st.lists(st.booleans(), min_size=seq, max_size=seq)) for _ in range(batch)]
        documents = torch.tensor(cuts).long().cumsum(1)
        position_ids = torch.stack(
            [torch.cat([torch.arange(n) for n in row.unique(return_counts=True)[1]]) for row in documents]
        )
        function = masking_utils.remap_positions_for_packed_sequence(function, position_ids)
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))
    arguments = {"q_offset": q_offset, "mask_function": function, "attention_mask": given_mask}
    expected = masking_utils.sdpa_mask(batch, q_length, kv_length, allow_is_causal_skip=False, **arguments)[:, 0]
    actual = expand(make_mask(batch, q_length, kv_length, **arguments), batch, q_length, kv_length)
    if given_mask is not None:  # what padding sees does not matter
        expected = expected & given_mask[:, q_offset : q_offset + q_length, None]
    assert torch.equal(actual, expected)


def test_one_mask_takes_no_memory_of_its_square() -> None:
    mask = make_mask(4, 2**20, 2**20)
    assert mask == AttentionMask(causal=True)


# ---- What cannot be honoured is refused.


def test_unknown_mask_functions_are_refused() -> None:
    model = make(*MODELS["llama"])
    model.set_attn_implementation("mindspeed")
    prefix = lambda b, h, q, kv: kv < 3  # noqa: E731
    with pytest.raises(ValueError, match=r"does not know the mask function .*or_mask"):
        masking_utils.create_causal_mask(
            model.config, torch.zeros(1, 8, 32), None, None, position_ids=None, or_mask_function=prefix
        )


def test_static_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="static cache"):
        make_mask(1, 1, 8, q_offset=torch.tensor(3))


def test_padding_between_tokens() -> None:
    """Order is kept, so full attention is right; distances are not."""
    given_mask = torch.tensor([[True, True, False, True]])
    mask = make_mask(1, 4, 4, attention_mask=given_mask)
    expected = torch.ones(4, 4, dtype=torch.bool).tril() & given_mask & given_mask.T
    assert torch.equal(expand(mask, 1, 4, 4)[0], expected)
    with pytest.raises(ValueError, match="padding between tokens"):
        make_mask(
            1, 4, 4, mask_function=masking_utils.sliding_window_causal_mask_function(2), attention_mask=given_mask
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, r"no ready-made mask, .*\[1, 1, 3, 3\]"),
        ({"dropout": 0.1}, "no dropout, but attention_dropout is 0.1"),
        ({"position_bias": torch.zeros(1, 1, 3, 3)}, "position_bias"),
        ({"sliding_window": 2}, "sliding window of 2 without a mask"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=message):
        attend(torch.nn.Module(), q, q, q, **{"attention_mask": None} | options)


def test_dropout_in_training_is_refused() -> None:
    model = make("llama", {"attention_dropout": 0.1})
    model.set_attn_implementation("mindspeed")
    model.eval()
    model(tokens(), use_cache=False)
    with pytest.raises(ValueError, match="attention_dropout"):
        model.train()(tokens(), use_cache=False)


def test_without_a_mask() -> None:
    """Modules that make none, such as vision towers: the module's flag or the caller's, and the ends of sequences."""
    module = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(attend(module, q, k, v, None, is_causal=False)[0], full)
    module.is_causal = False
    torch.testing.assert_close(attend(module, q, k, v, None)[0], full)
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    out, _ = attend(module, q, k, v, None, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
    part = torch.nn.functional.scaled_dot_product_attention(*(t[:, :, 2:] for t in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out[:, 2:], part)
