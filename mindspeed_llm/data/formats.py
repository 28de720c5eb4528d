"""Rows of the alpaca, sharegpt and openai formats, read as LLaMA-Factory reads them, become ``Conversation``s."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import islice, pairwise
from typing import Any

from mindspeed_llm.data.conversation import Conversation, Message, Role, RowError, ToolCall, merge_runs
from mindspeed_llm.data.specs import DatasetSpec

Row = Mapping[str, Any]

# A function call may follow text or a thought: everything before the JSON value.
_CALL = re.compile(r"(?P<text>(?:.*</think>\s*)?[^{\[]*)(?P<json>[{\[].*)", re.DOTALL)


def read_conversation(row: Row, spec: DatasetSpec, *, llamafactory: bool = False) -> Conversation:
    """The conversation in one row; raises ``RowError`` when there is none to train on.

    ``llamafactory=True`` reproduces what LLaMA-Factory does with rows that we read otherwise: answers without text are
    kept, messages in a row of one role spoil the row, openai rows get a system prompt about thinking, tool-call
    arguments given as a JSON text stay text, and the text beside an openai tool call is dropped.
    """
    conversation = _READERS[spec.formatting](row, spec, llamafactory)
    if not llamafactory:
        conversation = Conversation(merge_runs(conversation.messages), conversation.system, conversation.tools)
        for _, answer in conversation.exchanges():
            if not answer.content.strip() and not answer.calls:
                raise RowError("an answer is empty")
    elif spec.formatting != "openai" and any(one.role == other.role for one, other in pairwise(conversation.messages)):
        raise RowError("two messages of the same role in a row")
    return conversation


def _alpaca(row: Row, spec: DatasetSpec, llamafactory: bool) -> Conversation:
    prompt_column, response_column = spec.column("prompt"), spec.column("response")
    for column in (prompt_column, response_column):
        if column is not None and column not in row:
            raise missing_column(column, row)
    messages: list[Message] = []
    history = _optional(row, spec, "history") or []
    if not isinstance(history, list):
        raise RowError(f"the history is {_shorten(repr(history))}, not a list of pairs of question and answer")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError("an entry of the history is not a pair of question and answer")
        messages.append(Message("user", _text(pair[0], "a question in the history")))
        messages.append(Message("assistant", _text(pair[1], "an answer in the history")))
    question = [_text(row[c], f"column {c!r}") for c in (prompt_column, spec.column("query")) if c and row.get(c)]
    messages.append(Message("user", "\n".join(question)))
    if response_column is None or row[response_column] is None:
        raise RowError("there is no answer")
    messages.append(Message("assistant", _text(row[response_column], f"column {response_column!r}")))
    return Conversation(tuple(messages), _system(row, spec), _tools(row, spec))


def _sharegpt(row: Row, spec: DatasetSpec, llamafactory: bool) -> Conversation:
    system, turns = _system_and_turns(row, spec)
    roles: dict[str, Role] = {
        spec.tags["user_tag"]: "user",
        spec.tags["assistant_tag"]: "assistant",
        spec.tags["observation_tag"]: "tool",
        spec.tags["function_tag"]: "assistant",
    }
    messages = []
    for position, (tag, turn) in enumerate(turns, start=1):
        if tag not in roles:
            raise RowError(f"message {position} has the role {_shorten(repr(tag))}; known are {_names(roles)}")
        content = _text(turn.get(spec.tags["content_tag"]), f"message {position}")
        if tag == spec.tags["function_tag"]:
            text, calls = parse_calls(content, keep_text_arguments=llamafactory)
            messages.append(Message("assistant", text, calls))
        else:
            messages.append(Message(roles[tag], content))
    return Conversation(tuple(messages), system, _tools(row, spec))


def _openai(row: Row, spec: DatasetSpec, llamafactory: bool) -> Conversation:
    system, turns = _system_and_turns(row, spec)
    tools = _tools(row, spec)
    if llamafactory:
        system = _thinking_system(system, bool(_optional(row, spec, "tools")))
    roles: dict[str, Role] = {
        spec.tags["user_tag"]: "user",
        spec.tags["assistant_tag"]: "assistant",
        spec.tags["observation_tag"]: "tool",
        spec.tags["function_tag"]: "assistant",
    }
    messages = []
    for position, (tag, turn) in enumerate(turns, start=1):
        if tag not in roles:
            raise RowError(f"message {position} has the role {_shorten(repr(tag))}; known are {_names(roles)}")
        requested = turn.get("tool_calls") or []
        if not isinstance(requested, list):
            raise RowError(f"the tool calls of message {position} are not a list but {type(requested).__name__}")
        content = turn.get(spec.tags["content_tag"])
        if content is None and requested:  # the usual way to write a call without text
            content = ""
        content = _text(content, f"message {position}")
        if tag == spec.tags["function_tag"] and not requested:
            content, calls = parse_calls(content, keep_text_arguments=llamafactory)
        else:
            calls = _calls([_called(call) for call in requested], llamafactory)
        messages.append(Message(roles[tag], "" if llamafactory and calls else content, calls))
    return Conversation(tuple(messages), system, tools)


_READERS: dict[str, Callable[[Row, DatasetSpec, bool], Conversation]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "openai": _openai,
}


def _called(call: Any) -> Any:
    return call.get("function", call) if isinstance(call, Mapping) else call


def parse_calls(text: str, *, keep_text_arguments: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a function-call message into what is said before it and its calls (a JSON object or a list of them)."""
    match = _CALL.fullmatch(text)
    try:
        value = json.loads(match["json"]) if match else None
    except (ValueError, RecursionError):
        value = None
    if match is None or value is None:
        raise RowError(f"a function call is not JSON: {_shorten(text)}")
    return match["text"], _calls(value if isinstance(value, list) else [value], keep_text_arguments)


def _calls(values: list[Any], keep_text_arguments: bool) -> tuple[ToolCall, ...]:
    calls = []
    for value in values:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or "arguments" not in value:
            raise RowError(f"a function call has no 'name' and 'arguments': {_shorten(json.dumps(value, default=str))}")
        arguments = value["arguments"]
        if isinstance(arguments, str) and not keep_text_arguments:
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                name = _shorten(repr(value["name"]))
                raise RowError(f"the arguments of {name} are not JSON: {_shorten(arguments)}") from None
        calls.append(ToolCall(value["name"], arguments))
    return tuple(calls)


def _system_and_turns(row: Row, spec: DatasetSpec) -> tuple[str, list[tuple[str, Mapping[str, Any]]]]:
    """System prompt (the first message's, or else the column's) and the other messages with their role tags."""
    column = spec.column("messages") or "messages"
    turns = row.get(column)
    if column not in row:
        raise missing_column(column, row)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(f"column {column!r} is not a list of messages")
    role_tag = spec.tags["role_tag"]
    if role_tag not in turns[0]:
        raise RowError(f"message 1 has no {role_tag!r}; it has {_names(turns[0])}")
    tagged = [(str(turn.get(role_tag)), turn) for turn in turns]
    if tagged[0][0] == spec.tags["system_tag"]:
        return _text(turns[0].get(spec.tags["content_tag"]), "the system message"), tagged[1:]
    return _system(row, spec), tagged


def _system(row: Row, spec: DatasetSpec) -> str:
    value = _optional(row, spec, "system")
    return _text(value, "the system prompt") if value is not None else ""


def _tools(row: Row, spec: DatasetSpec) -> tuple[dict[str, Any], ...]:
    """Tool schemas: a JSON text or the list itself; a blank text means that there are none."""
    value = _optional(row, spec, "tools")
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {spec.column('tools')!r} is not JSON: {error}") from None
    if isinstance(value, Mapping):
        value = [value]
    if value is None:
        return ()
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        raise RowError(f"column {spec.column('tools')!r} is not a list of tools with a 'name'")
    return tuple(value)


def _is_tool(value: Any) -> bool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _thinking_system(system: str, has_tools: bool) -> str:
    """The system prompt that LLaMA-Factory's openai converter makes."""
    if has_tools:
        return f"{system}\n" if system else ""
    if not system:
        return "detailed thinking off"
    return system if "detailed thinking o" in system else f"{system}\ndetailed thinking off"


def missing_column(column: str, row: Row) -> RowError:
    return RowError(f"no column {column!r}; the row has {_names(row)}")


def _names(mapping: Mapping[Any, Any]) -> str:
    """Keys, for a message."""
    names = [_shorten(repr(key)) for key in islice(mapping, 20)]
    return ", ".join([*names, "..."] if len(mapping) > 20 else names) or "none"


def _optional(row: Row, spec: DatasetSpec, role: str) -> Any:
    column = spec.column(role)
    return row.get(column) if column else None


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what} is {'missing' if value is None else f'{_shorten(repr(value))}, not text'}")
    return value


def _shorten(text: str) -> str:
    text = text if len(text) <= 80 else text[:77] + "..."
    return text.encode(errors="backslashreplace").decode()
