"""``template: null``: answers are found in whatever the tokenizer's chat template writes, or the row is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.chat_template import ChatTemplateEncoder
from mindspeed_llm.data.conversation import Conversation, Message, RowError, ToolCall
from mindspeed_llm.data.encode import Document, EncodeOptions
from mindspeed_llm.data.templates import Style
from mindspeed_llm.errors import DataError

from .conftest import Prepare, WriteRows, alpaca, trained_text

# Drops the thoughts of earlier answers and opens a thought for the last one, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip() "
    "if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}{{ said }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# A template of the older kind: bos, no header for answers, an exception for roles that it does not know.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
# Opens a thought that answers in the history do not have.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
TWO = Conversation(
    (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye"), Message("assistant", "See you"))
)


def encode(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, thinking: bool | None = True, **options: Any
) -> list[Document]:
    settings = EncodeOptions(**{"cutoff_len": 1000, **options}, style=Style(enable_thinking=thinking))
    [documents] = ChatTemplateEncoder(tokenizer, settings)([conversation])
    if isinstance(documents, RowError):
        raise documents
    return documents


def trained(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    return trained_text({"labels": document.labels}, tokenizer)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("turns", [1, 3])
def test_equals_the_chatml_template(
    system: str | None, turns: int, prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The tokenizer's own template is ChatML: the ids are those of our template, and of transformers itself."""
    # LLaMA-Factory#10772, #3905: a template that is not the tokenizer's.
    history = [["Hi", "Hello"]] * (turns - 1)
    row = alpaca("How are you?", "Well.", history=history, system=system)
    entry = {"file_name": str(write_rows([row])), "columns": {"history": "history", "system": "system"}}
    own, ours = prepare(entry), prepare(entry, template="chatml")
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in [*history, ("How are you?", "Well.")]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    expected = shared_tokenizer.apply_chat_template(messages)["input_ids"]
    assert own.train[0]["input_ids"].tolist() == ours.train[0]["input_ids"].tolist() == expected
    assert trained_text(own.train[0], shared_tokenizer) == "Hello<|im_end|>" * (turns - 1) + "Well.<|im_end|>"
    # ours, like LLaMA-Factory's, also trains on the newline behind the end token, which is never generated
    newline = (ours.train[0]["labels"] != -100) & (own.train[0]["labels"] == -100)
    assert set(ours.train[0]["input_ids"][newline].tolist()) == {198}
    assert newline.sum() == turns


def test_answers_only_and_one_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    # OpenRLHF#393, trl#1400: a second bos; axolotl#3098: answers masked.
    tokenizer.chat_template = INST
    tokenizer.add_bos_token = True  # the template writes it already
    [document] = encode(tokenizer, TWO)
    assert trained(document, tokenizer) == " Hello<|im_end|> See you<|im_end|>"
    assert (document.input_ids == tokenizer.bos_token_id).sum() == 1


def test_mask_history(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = INST
    [document] = encode(tokenizer, TWO, mask_history=True)
    assert trained(document, tokenizer) == " See you<|im_end|>"


def test_train_on_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    [document] = encode(tokenizer, TWO, train_on_prompt=True)
    assert np.array_equal(document.labels, document.input_ids)


THOUGHTFUL = Conversation(
    (
        Message("user", "Hi"),
        Message("assistant", "<think>\nfirst\n</think>\n\nHello"),
        Message("user", "Bye"),
        Message("assistant", "<think>\nsecond\n</think>\n\nSee you"),
    )
)


def test_a_template_that_forgets_thoughts_loses_none(tokenizer: PreTrainedTokenizerBase) -> None:
    """Each part shows the history as the model will see it and is trained on one answer, its thought included."""
    tokenizer.chat_template = FORGETFUL
    first, second = encode(tokenizer, THOUGHTFUL)
    assert trained(first, tokenizer) == "<think>\nfirst\n</think>\n\nHello<|im_end|>"
    assert trained(second, tokenizer) == "<think>\nsecond\n</think>\n\nSee you<|im_end|>"
    shown = tokenizer.decode(second.input_ids[second.labels == -100])
    assert "assistant\nHello<|im_end|>" in shown
    assert "first" not in shown


def test_thinking_off_and_as_is(tokenizer: PreTrainedTokenizerBase) -> None:
    # LLaMA-Factory#7905: an empty thought that the prompt supplies was trained on.
    tokenizer.chat_template = FORGETFUL
    off = encode(tokenizer, THOUGHTFUL, thinking=False)
    assert [trained(document, tokenizer) for document in off] == ["Hello<|im_end|>", "See you<|im_end|>"]
    as_is = encode(tokenizer, Conversation((*TWO.messages[:2], *THOUGHTFUL.messages[2:])), thinking=None)
    assert [trained(document, tokenizer) for document in as_is] == [
        "Hello<|im_end|>",
        "<think>\nsecond\n</think>\n\nSee you<|im_end|>",
    ]


def test_a_prompt_that_opens_a_thought_the_answer_lacks(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = R1
    assert [trained(document, tokenizer) for document in encode(tokenizer, TWO)] == ["Hello<|im_end|>See you<|im_end|>"]


def test_splits_are_counted(tokenizer: PreTrainedTokenizerBase, prepare: Prepare, write_rows: WriteRows) -> None:
    tokenizer.chat_template = FORGETFUL
    messages = [{"role": m.role, "content": m.content} for m in THOUGHTFUL.messages]
    path = write_rows([{"messages": messages}])
    data = prepare({"file_name": str(path), "formatting": "openai"}, tokenizer=tokenizer)
    assert len(data.train) == 2
    assert "1 conversations split because the chat template rewrites earlier answers" in data.report


def test_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation(
        (
            Message("user", "Cold?"),
            Message("assistant", "", (ToolCall("weather", {"town": "Brem"}),)),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "No."),
        ),
        tools=({"name": "weather"},),
    )
    [document] = encode(tokenizer, conversation)
    assert 'Tools: [{"name": "weather"}]' in tokenizer.decode(document.input_ids)
    call = '\n<tool_call>\n{"name": "weather", "arguments": {"town": "Brem"}}\n</tool_call><|im_end|>'
    assert trained(document, tokenizer) == f"{call}No.<|im_end|>"


def test_what_the_template_refuses_is_a_bad_row(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = INST
    with pytest.raises(RowError, match="chat template refuses it: only user and assistant roles"):
        encode(tokenizer, Conversation(TWO.messages, system="Be brief."))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["writes no answers", "has no common beginning"],
)
def test_never_silently_without_labels(template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    # trl#4201, transformers#34172: a template without generation marks gave masks of zeros.
    tokenizer.chat_template = template
    with pytest.raises(RowError, match="gives an answer no place after its prompt"):
        encode(tokenizer, TWO)


def test_without_a_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"the tokenizer has no chat template\. Set data\.template"):
        encode(tokenizer, TWO)


@pytest.mark.parametrize("cutoff_len", range(1, 60, 7))
def test_truncation_keeps_what_the_other_templates_keep(
    cutoff_len: int, prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The same share for prompts and answers, up to the untrained newline between them."""
    rows = [alpaca("Question " * 9, "answer " * 9), alpaca("Q", "answer " * 30), alpaca("Question " * 30, "A")]
    path = write_rows(rows)
    if cutoff_len == 1:
        with pytest.raises(DataError):
            prepare(path, cutoff_len=cutoff_len)
        return
    own, ours = prepare(path, cutoff_len=cutoff_len), prepare(path, cutoff_len=cutoff_len, template="chatml")
    for index in range(len(own.train)):
        assert len(own.train[index]["input_ids"]) <= cutoff_len
        difference = abs((own.train[index]["labels"] != -100).sum() - (ours.train[index]["labels"] != -100).sum())
        assert difference <= 1


def test_truncated_history_loses_its_beginning(tokenizer: PreTrainedTokenizerBase) -> None:
    """The answer stays behind its question, not behind the beginning of the conversation."""
    long = Conversation((Message("user", "old " * 50), Message("assistant", "x"), *TWO.messages[2:]))
    [document] = encode(tokenizer, long, mask_history=True, cutoff_len=40)
    text = tokenizer.decode(document.input_ids)
    assert text.endswith("user\nBye<|im_end|>\n<|im_start|>assistant\nSee you<|im_end|>")
    assert text.startswith(" old old")
