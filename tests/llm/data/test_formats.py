"""Alpaca, sharegpt and openai rows, and what happens to rows that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.config import DatasetSource
from mindspeed_llm.data.conversation import Conversation, Message, RowError, ToolCall
from mindspeed_llm.data.formats import read_conversation
from mindspeed_llm.data.specs import DatasetSpec, dataset_specs

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}


def spec(formatting: str, **entry: Any) -> DatasetSpec:
    source = DatasetSource(file_name=__file__, formatting=formatting, **entry)  # type: ignore[arg-type]
    return dataset_specs(source, Path())[0]


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def test_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "sys": "Be brief.", "past": [["Hi", "Hello"]]}
    columns = {"system": "sys", "history": "past"}
    conversation = read_conversation(row, spec("alpaca", columns=columns))
    assert said(conversation) == [("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n1 and 2"), ("assistant", "3")]
    assert conversation.system == "Be brief."


def test_alpaca_columns_that_are_null_are_absent() -> None:
    """A columnar file has a value for every column in every row."""
    row = {"instruction": "Hi", "input": None, "output": "Hello", "system": None, "history": None}
    conversation = read_conversation(row, spec("alpaca", columns={"system": "system", "history": "history"}))
    assert said(conversation) == [("user", "Hi"), ("assistant", "Hello")]
    assert conversation.system == ""


def test_naming_the_prompt_names_the_whole_question() -> None:
    row = {"question": "Hi", "input": "not part of it", "output": "Hello"}
    assert said(read_conversation(row, spec("alpaca", columns={"prompt": "question"})))[0] == ("user", "Hi")


def test_sharegpt_with_a_tool() -> None:
    call = {"name": "weather", "arguments": {"town": "Brem"}}
    row = {
        "conversations": [
            {"from": "system", "value": "Use tools."},
            {"from": "human", "value": "Cold?"},
            {"from": "function_call", "value": "<think>\nask\n</think>\n\n" + json.dumps(call)},
            {"from": "observation", "value": "-3"},
            {"from": "gpt", "value": "Yes."},
        ],
        "tools": json.dumps([WEATHER]),
    }
    conversation = read_conversation(row, spec("sharegpt", columns={"tools": "tools"}))
    assert conversation.system == "Use tools."
    assert conversation.tools == (WEATHER,)
    assert conversation.messages[1] == Message(
        "assistant", "<think>\nask\n</think>\n\n", (ToolCall("weather", {"town": "Brem"}),)
    )
    assert conversation.messages[2] == Message("tool", "-3")


def test_tags_rename_roles_and_keys() -> None:
    row = {"chat": [{"who": "me", "says": "Hi"}, {"who": "it", "says": "Hello"}]}
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "it"}
    conversation = read_conversation(row, spec("sharegpt", columns={"messages": "chat"}, tags=tags))
    assert said(conversation) == [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize("arguments", ['{"town": "Brem"}', {"town": "Brem"}])
def test_openai_arguments_are_an_object_however_they_are_written(arguments: Any) -> None:
    row = openai_calls(arguments)
    conversation = read_conversation(row, spec("openai"))
    assert conversation.messages[1] == Message(
        "assistant", "Let me look.", (ToolCall("weather", {"town": "Brem"}), ToolCall("weather", {"town": "Brem"}))
    )
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "tool", "assistant"]


def openai_calls(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Cold?"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": [call, call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
    }


def test_openai_content_may_be_null_beside_a_call() -> None:
    row = openai_calls({})
    row["messages"][1]["content"] = None
    assert read_conversation(row, spec("openai")).messages[1].content == ""


def test_llamafactory_quirks_of_the_openai_format() -> None:
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    assert read_conversation(plain, spec("openai")).system == ""
    assert read_conversation(plain, spec("openai"), llamafactory=True).system == "detailed thinking off"
    called = read_conversation(openai_calls('{"town": "Brem"}'), spec("openai"), llamafactory=True)
    assert called.messages[1].content == ""
    assert called.messages[1].calls[0].arguments == '{"town": "Brem"}'


def test_messages_in_a_row_of_one_role_are_joined() -> None:
    # LLaMA-Factory#2962: such conversations were refused.
    turns = [("human", "Hi"), ("human", "there"), ("gpt", "Hello"), ("gpt", "you")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert said(read_conversation(row, spec("sharegpt"))) == [("user", "Hi\nthere"), ("assistant", "Hello\nyou")]
    with pytest.raises(RowError, match="two messages of the same role in a row"):
        read_conversation(row, spec("sharegpt"), llamafactory=True)


def test_blank_tools_are_no_tools() -> None:
    # LLaMA-Factory#7547: a blank was read as JSON.
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "tools": " "}
    assert read_conversation(row, spec("sharegpt", columns={"tools": "tools"})).tools == ()


def turns(*roles: str) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": "text"} for role in roles]}


@pytest.mark.parametrize(
    ("formatting", "row", "reason"),
    [
        ("alpaca", {"question": "Hi", "output": "Hello"}, "no column 'instruction'; the row has 'question', 'output'"),
        ("alpaca", {"instruction": "Hi"}, "no column 'output'"),
        ("alpaca", {"instruction": "Hi", "output": None}, "there is no answer"),
        ("alpaca", {"instruction": "Hi", "output": "  \n"}, "an answer is empty"),
        ("alpaca", {"instruction": "Hi", "output": 3}, "column 'output' is 3, not text"),
        ("alpaca", {"instruction": ["Hi"], "output": "Hello"}, "column 'instruction' is"),
        ("sharegpt", {"conversations": "Hi"}, "column 'conversations' is not a list of messages"),
        ("sharegpt", {"conversations": []}, "column 'conversations' is not a list of messages"),
        ("sharegpt", {"messages": []}, "no column 'conversations'; the row has 'messages'"),
        ("sharegpt", {"conversations": [{"role": "user"}]}, "message 1 has no 'from'; it has 'role'"),
        ("sharegpt", turns("human"), "does not end with an answer"),
        ("sharegpt", turns("gpt", "human"), "message 1 is the assistant's, but nothing was asked before it"),
        ("sharegpt", turns("human", "observation", "gpt"), "message 2 is a second tool message"),
        ("sharegpt", turns("human", "bot"), "message 2 has the role 'bot'; known are 'human', 'gpt'"),
        ("sharegpt", turns("human", "function_call"), "a function call is not JSON: text"),
        ("sharegpt", {"conversations": [{"from": "human"}, {"from": "gpt", "value": "x"}]}, "message 1 is missing"),
        ("openai", openai_calls("{town"), "the arguments of 'weather' are not JSON"),
        ("openai", openai_calls({}) | {"tools": "[{"}, "column 'tools' is not JSON"),
        ("openai", openai_calls({}) | {"tools": [{"title": "x"}]}, "column 'tools' is not a list of tools with a"),
        ("openai", openai_calls({}) | {"tools": 3}, "column 'tools' is not a list of tools"),
    ],
)
def test_rows_that_cannot_be_used(formatting: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as error:
        list(read_conversation(row, spec(formatting)).exchanges())
    assert reason in str(error.value)
