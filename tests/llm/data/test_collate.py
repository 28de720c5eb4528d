"""The layout of a micro-batch, and what a model makes of it: packed documents do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from mindspeed_kernels import hf
from mindspeed_llm.data.collate import Batch, Collator, Quirks, padding_token
from mindspeed_llm.data.store import Row

from .conftest import Prepare, WriteRows, alpaca


def row(*documents: list[int], masked: int = 0) -> Row:
    """A row of documents; the first ``masked`` labels of each are -100."""
    labels = [[-100] * masked + document[masked:] for document in documents]
    return Row(
        input_ids=np.array([token for document in documents for token in document], np.int32),
        labels=np.array([label for document in labels for label in document], np.int32),
        lengths=np.array([len(document) for document in documents], np.int64),
    )


def lists(batch: Batch) -> dict[str, Any]:
    return {key: value.tolist() for key, value in batch.items()}


def test_rows_of_different_length_are_padded_and_masked() -> None:
    batch = Collator(pad_token_id=9, pad_to_multiple=4)([row([1, 2, 3, 4, 5], masked=2), row([6, 7])])
    assert lists(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, 9, 9, 9, 9, 9, 9]],
        "labels": [[-100, 3, 4, 5, -100, -100, -100, -100], [7] + [-100] * 7],
        "position_ids": [[0, 1, 2, 3, 4, 5, 6, 7]] * 2,
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]],
    }
    assert all(value.dtype == torch.int64 for value in batch.values())
    assert batch.num_tokens == 7
    assert batch.num_unshifted_labels == 5


def test_no_mask_where_nothing_is_padded() -> None:
    assert "attention_mask" not in Collator(pad_token_id=0, pad_to_multiple=2)([row([1, 2]), row([3, 4])])


def test_packed_rows_tell_documents_apart_by_position() -> None:
    # torchtitan#4075: the last token of a document predicted the first of the next.
    batch = Collator(pad_token_id=9, pad_to_multiple=8)([row([1, 2, 3], [4, 5]), row([6, 7, 8, 1, 2, 3])])
    assert lists(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, 8, 1, 2, 3, 9, 9]],
        # the last token of a document is not trained to say the first of the next
        "labels": [[2, 3, -100, 5, -100, -100, -100, -100], [7, 8, 1, 2, 3, -100, -100, -100]],
        # padding is a document of its own behind several, and goes on behind one: nothing attends to it either way
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]],
    }
    assert batch.num_tokens == 11


def test_an_odd_cutoff_is_padded_everywhere() -> None:
    # LLaMA-Factory#10782: ids were padded to a multiple of 8, positions not.
    batch = Collator(pad_token_id=0, pad_to_multiple=8)([row(list(range(1, 8)), list(range(1, 7)))])
    assert {tuple(value.shape) for value in batch.values()} == {(1, 16)}


def test_a_rank_without_rows_gets_a_batch_without_targets() -> None:
    # ColossalAI#5370: a mean over no target is not a number.
    batch = Collator(pad_token_id=9, pad_to_multiple=8)([])
    assert lists(batch) == {"input_ids": [[9] * 8], "labels": [[-100] * 8], "position_ids": [list(range(8))]}
    assert (batch.num_tokens, batch.num_unshifted_labels) == (0, 0)


def test_quirks() -> None:
    """LLaMA-Factory pads packed rows to the full length, with position 0, and shifts labels across documents."""
    rows = [row([1, 2], [3, 4])]
    neat = Collator(9, 1, Quirks(row_length=6, leak=False))(rows)
    assert neat["position_ids"].tolist() == [[0, 1, 0, 1, 0, 0]]
    assert neat["labels"].tolist() == [[2, 3, 4, -100, -100, -100]]
    assert "attention_mask" not in neat
    assert Collator(9, 1, Quirks(row_length=6, leak=True))(rows)["attention_mask"].tolist() == [[1] * 6]


def test_padding_with_eos_keeps_the_eos_label(
    tokenizer: PreTrainedTokenizerBase, prepare: Prepare, write_rows: WriteRows
) -> None:
    path = write_rows([alpaca("Hi", "There"), alpaca("Hi", "There is more to say here")])
    tokenizer.pad_token = None
    assert padding_token(tokenizer) == tokenizer.eos_token_id == 962
    data = prepare(path, template="chatml", tokenizer=tokenizer)
    batch = Collator(padding_token(tokenizer))([data.train[0], data.train[1]])
    assert (batch["labels"] == 962).sum(dim=1).tolist() == [1, 1]
    assert (batch["input_ids"] == 962).sum() > 4  # padding is eos too
    wider = Collator(padding_token(tokenizer), pad_to_multiple=128)([data.train[0], data.train[1]])
    width = batch["labels"].shape[1]
    assert torch.equal(wider["labels"][:, :width], batch["labels"])
    assert (wider["labels"][:, width:] == -100).all()


def test_padding_token_of_a_tokenizer_without_any(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.pad_token = tokenizer.eos_token = None
    assert padding_token(tokenizer) == 0


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation=request.param,
    )
    return Qwen3ForCausalLM(config).eval()


def logits(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def loss_sum(model: Qwen3ForCausalLM, rows: list[Row], quirks: Quirks | None = None) -> float:
    batch = Collator(0, 8, quirks)(rows)
    scores = logits(model, batch).flatten(0, 1).double()
    return float(torch.nn.functional.cross_entropy(scores, batch["labels"].flatten(), reduction="sum"))


A, B, C, D = [5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16], [17, 18]


def test_packed_documents_have_the_losses_of_separate_ones(model: Qwen3ForCausalLM) -> None:
    # LLaMA-Factory#7318, functionary#265, nanoVLM#204: packs with other losses than their samples.
    separate = sum(loss_sum(model, [row(document)]) for document in (A, B, C, D))
    assert loss_sum(model, [row(A, B), row(C, D)]) == pytest.approx(separate, rel=1e-6)
    assert loss_sum(model, [row(A), row(B), row(C), row(D)]) == pytest.approx(separate, rel=1e-6)  # padded
    assert loss_sum(model, [row(A, B, C, D)]) == pytest.approx(separate, rel=1e-6)
    # the test can tell: with the mask that LLaMA-Factory's plain packing has, documents do see each other
    leaking = loss_sum(model, [row(A, B, C, D)], Quirks(row_length=16, leak=True))
    assert abs(leaking - separate) > 1e-2 * separate
    neat = loss_sum(model, [row(A, B, C, D)], Quirks(row_length=16, leak=False))
    assert abs(neat - separate) > 1.0  # it trains the last token of a document on the first of the next


def test_a_document_does_not_depend_on_the_others_in_its_batch(model: Qwen3ForCausalLM) -> None:
    # axolotl#1375: in batches of several packed rows documents saw each other.
    collate = Collator(0, 8)
    one = logits(model, collate([row(A, B), row(C, D)]))
    other = logits(model, collate([row([50, *A[1:]], B), row(C, D)]))
    assert torch.equal(one[0, 5:8], other[0, 5:8])
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0, :5], other[0, :5])


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(part.numel() for part in tree_leaves(result) if isinstance(part, torch.Tensor))])
        return result


def test_memory_of_packed_rows_is_linear_in_their_length(model: Qwen3ForCausalLM) -> None:
    """With our attention there is no mask of every position by every other; transformers' own makes one."""
    documents = [list(range(1, 33))] * 32
    batch = Collator(0, 8)([row(*documents)])
    tokens = batch["input_ids"].numel()
    assert tokens == 1024
    with LargestTensor() as theirs:
        logits(model, batch)
    assert theirs.size >= tokens**2
    hf.use_attention(model)
    with LargestTensor() as ours:
        logits(model, batch)
    assert ours.size <= 64 * tokens  # the logits
