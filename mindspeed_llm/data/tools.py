"""How each model family writes the tools that it may use, and its calls of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from mindspeed_llm.data.conversation import Content, RowError, ToolCall
from mindspeed_llm.data.harmony import HARMONY
from mindspeed_llm.data.tool_format import Tool, ToolFormat, Written, function_of, to_json, wrapped
from mindspeed_llm.errors import ConfigError


def _describe_react(tools: Sequence[Tool], today: date) -> str:
    blocks = []
    for tool in map(function_of, tools):
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
    names = ", ".join(function_of(tool)["name"] for tool in tools)
    return (
        f"You have access to the following tools:\n{''.join(blocks)}"
        f"Use the following format if using a tool:\n```\nAction: tool name (one of [{names}])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    )


def _call_react(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {to_json(call.arguments)}" for call in calls)


def _describe_qwen(tools: Sequence[Tool], today: date) -> str:
    signatures = "".join(f"\n{to_json(wrapped(tool))}" for tool in tools)
    return (
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{signatures}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
        '"arguments": <args-json-object>}\n</tool_call>'
    )


def _call_qwen(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>\n{to_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def _describe_llama3(tools: Sequence[Tool], today: date) -> str:
    schemas = "".join(f"{to_json(wrapped(tool), indent=4)}\n\n" for tool in tools)
    return (
        f"Cutting Knowledge Date: December 2023\nToday Date: {today:%d %b %Y}\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        f"Do not use variables.\n\n{schemas}"
    )


def _call_llama3(calls: Sequence[ToolCall]) -> str:
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return to_json(objects[0] if len(objects) == 1 else objects)


def _describe_mistral(tools: Sequence[Tool], today: date) -> Written:
    return ["[AVAILABLE_TOOLS] ", Content(to_json([wrapped(tool) for tool in tools])), "[/AVAILABLE_TOOLS]"]


def _call_mistral(calls: Sequence[ToolCall]) -> str:
    return to_json([{"name": call.name, "arguments": call.arguments} for call in calls])


def _describe_glm4(tools: Sequence[Tool], today: date) -> str:
    schemas = "".join(
        f"\n\n## {tool['name']}\n\n{to_json(tool, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        for tool in map(function_of, tools)
    )
    return (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
        f"你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{schemas}"
    )


def _call_glm4(calls: Sequence[ToolCall]) -> str:
    if len(calls) > 1:
        raise RowError("the glm4 tool format has no way to write several calls at once")
    return f"{calls[0].name}\n{to_json(calls[0].arguments)}"


def _describe_minimax1(tools: Sequence[Tool], today: date) -> str:
    schemas = "".join(f"{to_json(function_of(tool))}\n" for tool in tools)
    return (
        f"You are provided with these tools:\n<tools>\n{schemas}</tools>\n\n"
        "If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and "
        "json-object of arguments, following the format below:\n<tool_calls>\n"
        '{"name": <tool-name-1>, "arguments": <args-json-object-1>}\n...\n</tool_calls>'
    )


def _call_minimax1(calls: Sequence[ToolCall]) -> str:
    objects = "\n".join(to_json({"name": call.name, "arguments": call.arguments}) for call in calls)
    return f"<tool_calls>\n{objects}\n</tool_calls>"


def _describe_minimax2(tools: Sequence[Tool], today: date) -> str:
    schemas = "".join(f"<tool>{to_json(function_of(tool))}</tool>\n" for tool in tools)
    return (
        "\n\n# Tools\n\nYou may call one or more tools to assist with the user query.\n"
        f"Here are the tools available in JSONSchema format:\n\n<tools>\n{schemas}</tools>\n\n"
        "When making tool calls, use XML format to invoke tools and pass parameters:\n\n<minimax:tool_call>\n"
        '<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
        '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
    )


def _call_minimax2(calls: Sequence[ToolCall]) -> str:
    return f"<minimax:tool_call>\n{_invoke_minimax2(calls)}\n</minimax:tool_call>"


def _invoke_minimax2(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f'<invoke name="{call.name}">{_parameters_minimax2(call)}\n</invoke>' for call in calls)


def _parameters_minimax2(call: ToolCall) -> str:
    if not isinstance(call.arguments, Mapping):
        raise RowError(f"the arguments of {call.name!r} are not an object, which the minimax2 tool format needs")
    texts = ((name, value if isinstance(value, str) else to_json(value)) for name, value in call.arguments.items())
    return "".join(f'\n<parameter name="{name}">{text}</parameter>' for name, text in texts)


def _describe_deepseek(tools: Sequence[Tool], today: date) -> str:
    """As V3.1 describes them: the chat templates of V3 and R1 say nothing of tools."""
    schemas = "".join(
        f"\n### {tool['name']}\nDescription: {tool.get('description', '')}\n\n"
        f"Parameters: {to_json(tool.get('parameters') or {})}\n"
        for tool in map(function_of, tools)
    )
    return f"\n\n## Tools\nYou have access to the following tools:\n{schemas}"


def _call_deepseek(calls: Sequence[ToolCall]) -> Written:
    pieces = ["<｜tool▁calls▁begin｜>"]
    for index, call in enumerate(calls):
        pieces += ["\n" if index else "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", Content(call.name)]
        pieces += ["\n```json\n", Content(to_json(call.arguments)), "\n```<｜tool▁call▁end｜>"]
    return [*pieces, "<｜tool▁calls▁end｜>"]


def _announce_kimi(tools: Sequence[Tool]) -> Written:
    schemas = Content(to_json([wrapped(tool) for tool in tools]))
    return ["<|im_system|>tool_declare<|im_middle|>", schemas, "<|im_end|>"]


def _call_kimi(calls: Sequence[ToolCall]) -> Written:
    pieces = ["<|tool_calls_section_begin|>"]
    for call in calls:
        pieces += ["<|tool_call_begin|>functions.", Content(call.name), f":{call.number}<|tool_call_argument_begin|>"]
        pieces += [Content(to_json(call.arguments)), "<|tool_call_end|>"]
    return [*pieces, "<|tool_calls_section_end|>"]


def _result_kimi(call: ToolCall, text: str) -> str:
    return f"## Return of functions.{call.name}:{call.number}\n{text}"


_TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat("default", _describe_react, _call_react),
        ToolFormat("qwen", _describe_qwen, _call_qwen),
        ToolFormat("llama3", _describe_llama3, _call_llama3, is_dated=True),
        ToolFormat("mistral", _describe_mistral, _call_mistral),
        ToolFormat("glm4", _describe_glm4, _call_glm4),
        ToolFormat("minimax1", _describe_minimax1, _call_minimax1),
        ToolFormat("minimax2", _describe_minimax2, _call_minimax2, llamafactory_call=_invoke_minimax2),
        ToolFormat("deepseek", _describe_deepseek, _call_deepseek, beside=str),
        ToolFormat(
            "kimi", lambda tools, today: "", _call_kimi, announce=_announce_kimi, beside=str, result=_result_kimi
        ),
        HARMONY,
    )
}


def get_tool_format(name: str) -> ToolFormat:
    """The tool format of that name; raises ``ConfigError`` with the known ones."""
    if name not in _TOOL_FORMATS:
        raise ConfigError(f"data.tool_format: unknown format {name!r}. Known: {', '.join(_TOOL_FORMATS)}.")
    return _TOOL_FORMATS[name]
