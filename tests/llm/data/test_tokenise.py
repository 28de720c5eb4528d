"""Token ids are those of transformers, whichever way they are found."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase

from mindspeed_llm.data.templates import Content
from mindspeed_llm.data.tokenise import Tokeniser

from .conftest import ORACLES

TOKENS = ("<|im_end|>", "<|im_start|>", "<think>", "<｜User｜>", "[INST]", "\n", " ")
TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(TOKENS)), max_size=6).map("".join)


@given(text=TEXTS, split=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_are_those_of_transformers(text: str, split: bool, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    expected = shared_tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
    tokenise = Tokeniser(shared_tokenizer, split_special_tokens=split)
    assert tokenise._is_plain
    assert tokenise([[Content(text), "Hi", Content(text)]]) == [
        expected + shared_tokenizer("Hi", add_special_tokens=False)["input_ids"] + expected
    ]


def test_whatever_the_tokenizer_cuts_or_pads_itself_texts_stay_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenise = Tokeniser(tokenizer)
    expected = tokenise([["one two three four"], ["five"]])
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert tokenise([["one two three four"], ["five"]]) == expected


def test_a_class_that_changes_texts_is_heeded() -> None:
    plain: Any = AutoTokenizer.from_pretrained(ORACLES / "tokenizer")

    class Lower(type(plain)):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *arguments: Any, **options: Any) -> BatchEncoding:
            return super()._encode_plus([part.lower() for part in text], *arguments, **options)

    lower = Lower.from_pretrained(ORACLES / "tokenizer")
    assert Tokeniser(lower)([["HELLO"]]) == Tokeniser(plain)([["hello"]]) != Tokeniser(plain)([["HELLO"]])
