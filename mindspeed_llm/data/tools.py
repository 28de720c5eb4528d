"""How each model family writes the tools that it may use, and its calls of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from mindspeed_llm.data.conversation import RowError, ToolCall
from mindspeed_llm.errors import ConfigError

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """A family's way with tools.

    ``describe(tools, today)`` is the text appended to the system prompt; ``call(calls)`` what the assistant writes.
    """

    name: str
    describe: Callable[[Sequence[Tool], date], str]
    call: Callable[[Sequence[ToolCall]], str]
    is_dated: bool = False
    """The description contains the date."""


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _function(tool: Tool) -> Tool:
    """The function's own schema, whether or not it is wrapped as ``{"type": "function", "function": ...}``."""
    return tool["function"] if tool.get("type") == "function" else tool


def _wrapped(tool: Tool) -> Tool:
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _describe_react(tools: Sequence[Tool], today: date) -> str:
    blocks = []
    for tool in map(_function, tools):
        parameters = tool.get("parameters") or {}
        arguments = ""
        for name, schema in (parameters.get("properties") or {}).items():
            required = ", required" if name in parameters.get("required", []) else ""
            arguments += f"  - {name} ({schema.get('type', '')}{required}): {schema.get('description', '')}"
            if schema.get("enum"):
                arguments += f", should be one of [{', '.join(map(str, schema['enum']))}]"
            if schema.get("items"):
                arguments += f", where each item should be {schema['items'].get('type', '')}"
            arguments += "\n"
        blocks.append(
            f"> Tool Name: {tool['name']}\nTool Description: {tool.get('description', '')}\nTool Args:\n{arguments}\n"
        )
    names = ", ".join(_function(tool)["name"] for tool in tools)
    return (
        f"You have access to the following tools:\n{''.join(blocks)}"
        f"Use the following format if using a tool:\n```\nAction: tool name (one of [{names}])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    )


def _call_react(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {_json(call.arguments)}" for call in calls)


def _describe_qwen(tools: Sequence[Tool], today: date) -> str:
    signatures = "".join(f"\n{_json(_wrapped(tool))}" for tool in tools)
    return (
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{signatures}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
        '"arguments": <args-json-object>}\n</tool_call>'
    )


def _call_qwen(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>\n{_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def _describe_llama3(tools: Sequence[Tool], today: date) -> str:
    schemas = "".join(f"{_json(_wrapped(tool), indent=4)}\n\n" for tool in tools)
    return (
        f"Cutting Knowledge Date: December 2023\nToday Date: {today:%d %b %Y}\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        f"Do not use variables.\n\n{schemas}"
    )


def _call_llama3(calls: Sequence[ToolCall]) -> str:
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return _json(objects[0] if len(objects) == 1 else objects)


def _describe_mistral(tools: Sequence[Tool], today: date) -> str:
    return f"[AVAILABLE_TOOLS] {_json([_wrapped(tool) for tool in tools])}[/AVAILABLE_TOOLS]"


def _call_mistral(calls: Sequence[ToolCall]) -> str:
    return _json([{"name": call.name, "arguments": call.arguments} for call in calls])


def _describe_glm4(tools: Sequence[Tool], today: date) -> str:
    schemas = "".join(
        f"\n\n## {tool['name']}\n\n{_json(tool, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        for tool in map(_function, tools)
    )
    return (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
        f"你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{schemas}"
    )


def _call_glm4(calls: Sequence[ToolCall]) -> str:
    if len(calls) > 1:
        raise RowError("the glm4 tool format has no way to write several calls at once")
    return f"{calls[0].name}\n{_json(calls[0].arguments)}"


_TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat("default", _describe_react, _call_react),
        ToolFormat("qwen", _describe_qwen, _call_qwen),
        ToolFormat("llama3", _describe_llama3, _call_llama3, is_dated=True),
        ToolFormat("mistral", _describe_mistral, _call_mistral),
        ToolFormat("glm4", _describe_glm4, _call_glm4),
    )
}


def get_tool_format(name: str) -> ToolFormat:
    """The tool format of that name; raises ``ConfigError`` with the known ones."""
    if name not in _TOOL_FORMATS:
        raise ConfigError(f"data.tool_format: unknown format {name!r}. Known: {', '.join(_TOOL_FORMATS)}.")
    return _TOOL_FORMATS[name]
