"""What a way to write tools consists of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from mindspeed_llm.data.conversation import Content, ToolCall

Tool = Mapping[str, Any]
Written = str | list[str]
"""A text with special tokens of the format's own has its ``Content`` in pieces; any other counts as content whole."""


@dataclass(frozen=True)
class ToolFormat:
    """A family's way with tools.

    ``describe(tools, today)`` is the text appended to the system prompt; ``call(calls)`` what the assistant writes.
    """

    name: str
    describe: Callable[[Sequence[Tool], date], Written]
    call: Callable[[Sequence[ToolCall]], Written]
    is_dated: bool = False
    """The description contains the date."""
    llamafactory_call: Callable[[Sequence[ToolCall]], Written] | None = None
    """How LLaMA-Factory writes calls, where it is not the model's way."""
    announce: Callable[[Sequence[Tool]], Written] = lambda tools: ""
    """What stands for ``{tools}`` in a template's prefix."""
    beside: Callable[[str], Written] = lambda text: text.removesuffix("\n") + "\n"
    """How the text beside calls is written before them."""
    result: Callable[[ToolCall, str], Written] | None = None
    """How the result of a call is written, if it says of which."""


def pieces_of(text: Written) -> list[str]:
    return text if isinstance(text, list) else [Content(text)] if text else []


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def function_of(tool: Tool) -> Tool:
    """The function's own schema, whether or not it is wrapped as ``{"type": "function", "function": ...}``."""
    return tool.get("function", tool)


def wrapped(tool: Tool) -> Tool:
    return {"type": "function", **tool} if "function" in tool else {"type": "function", "function": tool}
